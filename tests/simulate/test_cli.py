# SPDX-License-Identifier: Apache-2.0
"""`quire simulate run`: sweeps, files that it writes, and mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.entrypoints.cli.main import main
from quire.errors import ConfigError
from quire.simulate.load import LoadDescription
from quire.simulate.machine import read_machine, write_machine
from quire.simulate.page import page
from quire.simulate.report import summarize
from quire.simulate.sweep import Scenario
from tests.fixtures.folded import folded
from tests.simulate.machines import make_machine, make_simulator

SMALL = ["--num-requests", "6", "--prompt-tokens", "4-20", "--output-tokens", "5"]


@pytest.fixture
def machine_file(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    write_machine(make_machine(num_scheduler_steps=4), path)
    return path


def test_machine_file_is_read_as_written(machine_file: Path) -> None:
    read, written = read_machine(machine_file), make_machine(num_scheduler_steps=4)
    assert (read.model, read.costs, read.config, read.cache) == (
        written.model,
        written.costs,
        written.config,
        written.cache,
    )


def test_run_prints_a_row_for_each_value(
    machine_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file, page_file = tmp_path / "out.json", tmp_path / "out.html"
    files = ["--json", str(json_file), "--page", str(page_file)]
    vary = ["--vary", "max_num_seqs=1,2,4", "--vary", "seed=3"]
    assert main(["simulate", "run", str(machine_file), *SMALL, *vary, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["max_num_seqs=1", "max_num_seqs=2", "max_num_seqs=4"]
    numbers = json.loads(json_file.read_text())
    assert [one["num_requests"] for one in numbers] == [6, 6, 6]
    assert numbers[2]["ttft_ms"]["p99"] < numbers[0]["ttft_ms"]["p99"]
    assert page_file.read_text().startswith("<!doctype html>")


@folded(
    ("option", "message"),
    [
        ("block_size=8", "can vary"),
        ("nothing=1", "can vary"),
        ("max_num_seqs", "write an option"),
        ("max_num_seqs=", "write an option"),
        ("max_num_seqs=0", "at least 1"),
        ("max_num_seqs=x", "'x'"),
        ("max_num_seqs=64", "max-num-batched-tokens"),
        ("async_scheduling=true", "made ahead"),
        ("num_gpu_blocks_override=1", "at least 2"),
        ("kv_cache_memory_bytes=9", "too little"),
        ("enable_prefix_caching=perhaps", "perhaps"),
        ("fair_weights={}", "JSON objects"),
        ("rate=0", "--rate must be above 0"),
        ("concurrency=-1", "at least 0"),
    ],
)
def test_wrong_variation_is_explained(
    machine_file: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    assert main(["simulate", "run", str(machine_file), *SMALL, "--vary", option]) != 0
    assert message in capsys.readouterr().err


def test_two_options_with_several_values_are_refused(
    machine_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vary = ["--vary", "max_num_seqs=1,2", "--vary", "rate=1,2"]
    assert main(["simulate", "run", str(machine_file), *SMALL, *vary]) != 0
    assert "vary one option at a time" in capsys.readouterr().err


def test_load_option_of_a_file_is_refused(tmp_path: Path) -> None:
    scenario = Scenario.from_machine(make_machine(), LoadDescription().requests()[:1])
    with pytest.raises(ConfigError, match="given by a file"):
        scenario.with_option("rate", "2")


@folded("content", ["", "{}", "[1]", '{"version": 99}', '{"version": 1, "model": 3}', "\udcff"])
def test_file_that_is_no_machine_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"machine\.json"):
        read_machine(path)


def test_every_option_kind_can_be_varied() -> None:
    scenario = Scenario.from_machine(make_machine(), LoadDescription())
    assert scenario.with_option("--max-num-seqs", "2").config.scheduler.max_num_seqs == 2
    assert not scenario.with_option("enable_prefix_caching", "false").config.cache.enable_prefix_caching
    assert scenario.with_option("num_gpu_blocks_override", "20").cache.num_blocks == 20
    assert scenario.with_option("scheduling_policy", "fair").config.scheduler.scheduling_policy == "fair"
    varied = scenario.with_option("rate", "inf").with_option("prompt_tokens", "~9").load
    assert isinstance(varied, LoadDescription)
    assert varied.prompt_tokens == "~9"


def test_page_loads_nothing_and_escapes_names() -> None:
    run = make_simulator(make_machine()).run(LoadDescription(4, 5.0, "9", "5").requests())
    html = page("<script>alert(1)</script>", [(summarize("<b>&'\"", run), run)])
    assert "<script" not in html
    assert "<b>" not in html
    assert not re.search(r"https?://|src=|href=|url\(", html)
