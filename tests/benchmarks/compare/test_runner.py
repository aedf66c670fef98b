# SPDX-License-Identifier: Apache-2.0
"""Engines take turns, a failure costs only its own case, and a session can be cut off anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.compare import disturbance, records, runner
from benchmarks.compare.cases import CASES
from benchmarks.compare.disturbance import Times
from benchmarks.compare.isa import ISAS
from benchmarks.compare.runner import Session
from tests.benchmarks.compare.fake_engine import FakeEngine


def session(tmp_path: Path, engines: Sequence[FakeEngine], num_rounds: int = 2) -> Session:
    return Session(
        engines={engine.name: engine for engine in engines},
        checkpoint=tmp_path,
        isa=ISAS["avx2"],
        cases=tuple(CASES),
        num_rounds=num_rounds,
        limit_s=1.0,
        results=tmp_path / "results.jsonl",
        say=lambda line: None,
    )


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on the machine of the tests."""
    ticks = itertools.count(1)
    monkeypatch.setattr(disturbance, "now", lambda: Times(next(ticks), 0.0, 0.0))


def keys(tmp_path: Path) -> list[tuple[int, str, str]]:
    return [(one.round, one.engine, one.case) for one in records.read(tmp_path / "results.jsonl")]


def every_key(*names: str) -> list[tuple[int, str, str]]:
    return [(number, name, case) for number in range(2) for name in names for case in CASES]


def test_engines_take_turns(tmp_path: Path) -> None:
    assert not runner.measure(session(tmp_path, [FakeEngine("a"), FakeEngine("b")]))
    assert keys(tmp_path) == every_key("a", "b")


def test_a_session_in_pieces_is_the_same_session(tmp_path: Path) -> None:
    pieces = 0
    while runner.measure(session(tmp_path, [FakeEngine("a"), FakeEngine("b")]), max_runs=1):
        pieces += 1
    assert pieces == 3
    assert keys(tmp_path) == every_key("a", "b")


def test_a_run_that_was_cut_off_is_completed(tmp_path: Path) -> None:
    records.append(tmp_path / "results.jsonl", [records.Record("a", "bf16", "decode-1", 0, 1.0)])
    engine = FakeEngine("a")
    runner.measure(session(tmp_path, [engine], num_rounds=1))
    assert [list(task.cases) for task in engine.tasks] == [["prefill", "decode-16", "batch"]]


def test_a_disturbed_rate_does_not_count_and_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([Times(0, 0, 0), Times(10, 10, 9), Times(20, 20, 19), Times(30, 30, 29)])
    monkeypatch.setattr(disturbance, "now", lambda: next(moments))
    again = session(tmp_path, [FakeEngine("a")], num_rounds=1)
    runner.measure(again)
    assert [one.disturbed for one in records.read(again.results)] == [True] * len(CASES)
    runner.measure(again)
    assert [one.disturbed for one in records.read(again.results)] == [True] * len(CASES) + [False] * len(
        CASES
    )
    runner.measure(again)


def test_failed_case_is_skipped_later_and_others_continue(tmp_path: Path) -> None:
    engine = FakeEngine("a", broken=["decode-1"])
    runner.measure(session(tmp_path, [engine]))
    assert [list(task.cases) for task in engine.tasks] == [
        list(CASES),
        ["decode-16", "batch"],
        ["prefill", "decode-16", "batch"],
    ]
    (failure,) = (one for one in records.read(tmp_path / "results.jsonl") if one.error)
    assert (failure.case, failure.rate, failure.error) == ("decode-1", None, "decode-1 is too hard")


def test_engine_setup_failure_is_recorded_once_others_continue(tmp_path: Path) -> None:
    runner.measure(session(tmp_path, [FakeEngine("a", broken=["set-up"]), FakeEngine("b")]))
    assert keys(tmp_path) == [(0, "a", ""), *every_key("b")]
