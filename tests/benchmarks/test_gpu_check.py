# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.gpu.check` from end to end on a CPU, with tiny shapes: so no mistake of its own costs time on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")
from benchmarks.gpu import check, engine_checks, imports, kernel_checks, late_checks, rank_checks, runner
from benchmarks.gpu.journal import Journal, supervise
from benchmarks.gpu.runner import Check, Outcome, outcome_of, run_checks
from benchmarks.gpu.target import Target
from quire.executor import uniproc
from tests.worker.fake_gpu import FakeGpu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter


@pytest.mark.more
@pytest.mark.parametrize("group", list(check.GROUPS))
def test_every_group_passes_in_a_dry_run(
    group: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    code = check.main(["--device", "cpu", "--tiny", "--only", group, "--out", str(page)])
    printed = capfd.readouterr()
    assert code == 0, printed.out + printed.err
    rows = [line for line in page.read_text().splitlines() if line.startswith("| pass")]
    assert len(rows) == sum(line.startswith("pass ") for line in printed.out.splitlines())
    assert len(rows) > 2
    assert "torch" in page.read_text().splitlines()[2]


@pytest.mark.more
def test_processes_share_the_checks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page, args = tmp_path / "page.md", ["--device", "cpu", "--tiny", "--only", "models"]
    assert check.main([*args, "--jobs", "2", "--out", str(page)]) == 0, capfd.readouterr().err
    target = Target(torch.device("cpu"), tiny=True)
    names = [one.name for one in check._checks(target, ["models"], tmp_path)]
    rows = [line.split(" | ")[1] for line in page.read_text().splitlines() if line.startswith("| pass")]
    assert rows == names


def test_no_process_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--device", "cpu", "--tiny", "--jobs", "0"])
    assert "--jobs must be at least 1; it is 0" in capsys.readouterr().err


@pytest.mark.more
def test_the_engine_checks_on_a_device_with_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fake GPU of the worker's tests, which is asynchronous and replays decode steps."""
    devices: list[FakeGpu] = []

    def make(name: str) -> FakeGpu:
        devices.append(FakeGpu())
        return devices[-1]

    monkeypatch.setattr(uniproc, "make_device", make)
    target = Target(torch.device("cpu"), tiny=True)
    found = [*engine_checks.first_checks(target, tmp_path), *engine_checks.checks(target, tmp_path)]
    checks = [one for one in found if any(word in one.name for word in _ON_A_DEVICE)]
    outcomes = outcomes_of(checks, tmp_path)
    assert [outcome.passed for outcome in outcomes] == [True] * 12, [outcome.trouble for outcome in outcomes]
    assert any(device.replayed for device in devices)
    assert any(device.replayed_choices for device in devices)


def test_device_only_checks_come_first(tmp_path: Path) -> None:
    assert next(iter(check.GROUPS)) == "device"
    names = [one.name for one in engine_checks.first_checks(Target(torch.device("cpu"), tiny=True), tmp_path)]
    order = ["graphs, ", "overlapped", "200 steps", "swapped", "compiled after start"]
    firsts = [next(i for i, name in enumerate(names) if word in name) for word in order]
    assert firsts == sorted(firsts)
    missing = {"fp8", "fp8 KV cache", "batch-invariant"}
    assert {
        name.split("after start, ")[1] for name in names if "after start, " in name
    } == late_checks.KINDS.keys() - missing


@pytest.mark.parametrize(
    ("kind", "count", "said"), [("cuda", 1, "want 2 devices and there is 1"), ("cuda", 2, None)]
)
def test_two_device_checks_are_skipped_without_two_devices(
    kind: str, count: int, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(rank_checks, "write_tiny_model", lambda name, directory: directory)
    target = Target(torch.device(kind), tiny=True)
    assert [*check._remarks(target, ["ranks"])] == ([f"2 ranks: left out, they {said}"] if said else [])
    assert len([*rank_checks.checks(target, tmp_path)]) == (0 if said else 9)


_ON_A_DEVICE = ("graphs, ", "overlapped", "200", "swapped")


def outcomes_of(checks: list[Check], folder: Path, limit_s: float = 1e9, **options: Any) -> list[Outcome]:
    """Run the checks and return the outcomes that the journal holds afterwards."""
    run_checks(checks, limit_s, Journal(folder / "journal"), **options)
    return [outcome_of(*item) for item in Journal(folder / "journal").entries.items()]


def test_a_failure_is_reported_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode() -> float:
        raise ValueError("no such kernel")

    outcomes = outcomes_of(
        [
            Check("exact", lambda: 0.0),
            Check("far off", lambda: 2.0, 0.5),
            Check("not a number", lambda: float("nan"), 0.5),
            Check("raises", explode),
            Check("near", lambda: 0.4, 0.5),
        ],
        tmp_path,
    )
    assert [outcome.verdict for outcome in outcomes] == ["pass", "FAIL", "FAIL", "FAIL", "pass"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[3].endswith("ValueError: no such kernel")


def test_checks_that_find_no_time_count_as_failed(tmp_path: Path) -> None:
    times = iter([0.0, 1.0, 1.0, 9.0, 11.0, 12.0])
    checks = [Check("first", lambda: 0.0), Check("late", lambda: 0.0)]
    outcomes = outcomes_of(checks, tmp_path, 10.0, clock=lambda: next(times))
    assert [outcome.verdict for outcome in outcomes] == ["pass", "not run"]
    assert "no time left of 10 s" in outcomes[1].line()


def test_lost_device_ends_the_process_and_another_continues(tmp_path: Path) -> None:
    def explode() -> float:
        raise RuntimeError("an illegal memory access was encountered")

    checks = [Check("fine", lambda: 0.0), Check("breaks", explode), Check("behind", lambda: 0.0)]
    journal = Journal(tmp_path / "journal")
    assert not run_checks(checks, 60, journal, answers=lambda: False)
    assert list(journal.entries) == ["fine", "breaks"]
    outcomes = outcomes_of(checks, tmp_path)
    assert [outcome.verdict for outcome in outcomes] == ["pass", "FAIL", "pass"]


WORKER = """
import faulthandler, os, sys, time
from pathlib import Path
from benchmarks.gpu.journal import Journal

journal = Journal(Path(sys.argv[sys.argv.index("--journal") + 1]))
faulthandler.enable()
for name in ("a", "crash", "b", "hang", "c"):
    if name not in journal.entries:
        journal.begin(name)
        if name == "crash":
            os._exit(139)
        if name == "hang":
            time.sleep(1000)
        journal.end(name, 0.1)
"""


@pytest.mark.more
def test_a_process_that_dies_or_hangs_costs_one_check(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path)
    assert supervise([sys.executable, "-c", WORKER], path, 600.0, silence_s=15.0) == 0
    outcomes = [outcome_of(*item) for item in Journal(path).entries.items()]
    assert [outcome.name for outcome in outcomes] == ["a", "crash", "b", "hang", "c"]
    troubles = [outcome.trouble.rpartition(" ")[2] for outcome in outcomes]
    assert troubles == ["", "139", "", "-6", ""]
    assert [outcome.verdict for outcome in outcomes if outcome.trouble] == ["FAIL", "FAIL"]


def test_a_process_that_begins_nothing_is_not_started_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path)
    assert supervise([sys.executable, "-c", "raise SystemExit(9)"], path, 60.0) == 9


def test_a_failed_check_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(target: Target, scratch: Path) -> list[Check]:
        raise RuntimeError("cannot even begin")

    monkeypatch.setitem(check._CHECKS, "cases", broken)
    path, page = tmp_path / "journal", tmp_path / "page.md"
    assert check.main(["--device", "cpu", "--tiny", "--only", "cases", "--journal", str(path)]) == 0
    assert check._report([Journal(path)], page) == 1
    assert "| FAIL | cases: could not begin |" in page.read_text()


def test_missing_packages_are_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(imports, "find_spec", lambda name: None if name == "msgspec" else object())
    assert check.main(["--device", "cpu", "--tiny"]) == 2
    assert "missing: msgspec. Install them" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no CUDA device"):
        check.main(["--only", "cases", "--journal", "unused"])


@pytest.mark.parametrize(
    ("installed", "is_older"), [("5.17.0", True), ("5.9.1", True), ("5.23.0", False), ("6.0", False)]
)
def test_outdated_oracle_is_reported(installed: str, is_older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "version", lambda _package: installed)
    found = imports.older_oracle()
    assert found is None or f"transformers {installed} is older than {imports.ORACLE}" in found
    assert (found is not None) is is_older


def test_importing_the_command_imports_no_torch() -> None:
    assert "torch" not in vars(check)
    assert "torch" not in vars(imports)
    assert "torch" not in vars(runner)


@pytest.mark.parametrize(
    ("got", "error"), [([1.0, 2.0], 0.0), ([1.0, 1.0], 0.5), ([1.0, torch.inf], float("inf"))]
)
def test_relative_error(got: list[float], error: float) -> None:
    assert kernel_checks.relative_error(torch.tensor(got), torch.tensor([1.0, 2.0])) == error
