"""`benchmarks.gpu.check` from end to end on a CPU, with tiny shapes: so no mistake of its own costs time on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")
from benchmarks.gpu import check, engine_checks, imports, kernel_checks, runner
from benchmarks.gpu.runner import Check, run_checks
from benchmarks.gpu.target import Target
from quire.executor import uniproc
from tests.worker.fake_gpu import FakeGpu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter


@pytest.mark.more
@pytest.mark.parametrize("group", list(check.GROUPS))
def test_every_group_passes_in_a_dry_run(
    group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    code = check.main(["--device", "cpu", "--tiny", "--only", group, "--out", str(page)])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    rows = [line for line in page.read_text().splitlines() if line.startswith("| pass")]
    assert len(rows) == sum(line.startswith("pass ") for line in printed.out.splitlines())
    assert len(rows) > 2
    assert "torch" in page.read_text().splitlines()[2]


def test_the_engine_checks_on_a_device_with_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fake GPU of the worker's tests, which is asynchronous and replays decode steps."""
    devices: list[FakeGpu] = []

    def make(name: str) -> FakeGpu:
        devices.append(FakeGpu())
        return devices[-1]

    monkeypatch.setattr(uniproc, "make_device", make)
    target = Target(torch.device("cpu"), tiny=True)
    checks = [
        one for one in engine_checks.checks(target, tmp_path) if "overlapped" in one.name or "200" in one.name
    ]
    outcomes = run_checks(checks, 60)
    assert [outcome.passed for outcome in outcomes] == [True] * 4, [outcome.trouble for outcome in outcomes]
    assert any(device.replayed for device in devices)


def test_a_failure_is_reported_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def explode() -> float:
        raise ValueError("no such kernel")

    outcomes = run_checks(
        [
            Check("exact", lambda: 0.0),
            Check("far off", lambda: 2.0, 0.5),
            Check("not a number", lambda: float("nan"), 0.5),
            Check("raises", explode),
            Check("near", lambda: 0.4, 0.5),
        ],
        limit_s=60,
    )
    assert [outcome.verdict for outcome in outcomes] == ["pass", "FAIL", "FAIL", "FAIL", "pass"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[3].endswith("ValueError: no such kernel")


def test_checks_that_find_no_time_count_as_failed() -> None:
    times = iter([0.0, 1.0, 1.0, 9.0, 11.0, 12.0])
    outcomes = run_checks(
        [Check("first", lambda: 0.0), Check("late", lambda: 0.0)], 10.0, lambda: next(times)
    )
    assert [outcome.verdict for outcome in outcomes] == ["pass", "not run"]
    assert "no time left of 10 s" in outcomes[1].line()


def test_a_failed_check_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(target: Target, scratch: Path) -> list[Check]:
        raise RuntimeError("cannot even begin")

    monkeypatch.setitem(check._CHECKS, "cases", broken)
    page = tmp_path / "page.md"
    assert check.main(["--device", "cpu", "--tiny", "--only", "cases", "--out", str(page)]) == 1
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
        check.main(["--only", "cases"])


def test_importing_the_command_imports_no_torch() -> None:
    assert "torch" not in vars(check)
    assert "torch" not in vars(imports)
    assert sys.modules["benchmarks.gpu.runner"] is runner


@pytest.mark.parametrize(
    ("got", "error"), [([1.0, 2.0], 0.0), ([1.0, 1.0], 0.5), ([1.0, torch.inf], float("inf"))]
)
def test_relative_error(got: list[float], error: float) -> None:
    assert kernel_checks.relative_error(torch.tensor(got), torch.tensor([1.0, 2.0])) == error
