# SPDX-License-Identifier: Apache-2.0
"""Tests of the arguments given to llama.cpp's tools and of the rates read from their output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare.cases import CASES
from benchmarks.compare.engines.base import Rate, Task
from benchmarks.compare.engines.llama_cpp import (
    VERSION,
    LlamaCpp,
    batched_bench_rates,
    bench_rates,
    instructions,
)
from benchmarks.compare.isa import ISAS
from benchmarks.compare.lookup import rate_in

BENCH = """[
  {"model_type": "qwen2 1B BF16", "n_prompt": 512, "n_gen": 0, "avg_ts": 182.1, "samples_ts": [ 182.1 ]},
  {"model_type": "qwen2 1B BF16", "n_prompt": 0, "n_gen": 64, "avg_ts": 36.1, "samples_ts": [ 36.1 ]}
]
"""
BATCHED = [
    "main: warming up\n",
    '{"n_kv_max": 4096, "pp": 8, "tg": 31, "pl": 16, "t_pp": 1.0, "t_tg": 5.0, "t": 6.0, "speed": 104.0}\n',
    '{"n_kv_max": 4096, "pp": 64, "tg": 31, "pl": 16, "t_pp": 5.0, "t_tg": 5.0, "t": 10.0, "speed": 152.0}\n',
    "\n",
]


def test_rates_of_llama_bench() -> None:
    found = bench_rates(BENCH.splitlines(keepends=True), [CASES["decode-1"], CASES["prefill"]])
    assert list(found) == [Rate("decode-1", 36.1), Rate("prefill", 182.1)]


def test_decode_rate_counts_steps_and_total_rate_all_tokens() -> None:
    found = batched_bench_rates(BATCHED, [CASES["decode-16"], CASES["batch"]])
    assert list(found) == [Rate("decode-16", 16 * 31 / 5.0), Rate("batch", 16 * 32 / 10.0)]


def test_benchmark_that_was_not_run_is_an_error() -> None:
    with pytest.raises(ValueError):
        list(bench_rates([json.dumps([])], [CASES["prefill"]]))


def test_tools_get_the_arguments_of_the_cases(tmp_path: Path) -> None:
    """The tools are stand-ins that write down their arguments."""
    isa = ISAS["native"]
    engine = LlamaCpp(tmp_path)
    tools = tmp_path / "build-native" / "bin"
    tools.mkdir(parents=True)
    (tools.parent / "processor").write_text(instructions())
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".complete").touch()
    for tool, printed in (("llama-bench", BENCH), ("llama-batched-bench", "".join(BATCHED))):
        (tools / tool).write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/{tool}\ncat <<'END'\n{printed}END\n")
        (tools / tool).chmod(0o755)
    for tool in ("llama-quantize", "llama-lookup", "llama-perplexity"):
        (tools / tool).touch()
    engine.set_up(isa)
    found = list(engine.measure(Task(isa, "Q4_0", tuple(CASES), 0, 60.0)))
    assert [rate.case for rate in found] == list(CASES)
    model = f"-m {tmp_path}/Q4_0.gguf"
    assert (tmp_path / "llama-bench").read_text() == f"{model} -p 512 -n 64 -r 1 -t 2 -o json\n"
    sizes = "-npp 8,64 -ntg 31 -npl 16 -c 4096 -t 2 --output-format jsonl"
    assert (tmp_path / "llama-batched-bench").read_text() == f"{model} {sizes}\n"


def test_native_build_of_another_processor_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("benchmarks.compare.processes.run", lambda command, *_: ran.append(str(command[0])))
    build, engine = tmp_path / "build-native", LlamaCpp(tmp_path)
    (build / "bin").mkdir(parents=True)
    (build / "processor").write_text("amx_tile avx512f")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".complete").touch()
    (tmp_path / f"llama_cpp_python-{VERSION}").mkdir()
    (tmp_path / f"llama_cpp_python-{VERSION}" / "PKG-INFO").touch()
    with pytest.raises(FileNotFoundError):  # nothing is there: `cmake` did not run
        engine.set_up(ISAS["native"])
    assert ran == ["cmake"]
    assert not build.exists()


def test_rates_of_llama_lookup() -> None:
    log = (
        "I encoded  130 tokens in    2.000 seconds, speed:  65 t/s\ndecoded  128 tokens in    6.000 seconds\n"
    )
    assert rate_in(log) == 128 / 8.0
