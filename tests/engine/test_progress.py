# SPDX-License-Identifier: Apache-2.0
"""Tests of a core's progress record, and of when its silence counts as a hang."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.config.scheduler import BUSY_FACTOR
from quire.engine.core_progress import ProgressFile
from quire.sampling_params import SamplingParams
from quire.scheduler.output import (
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
)
from quire.supervision.progress import (
    LONGEST_FACTOR,
    TICK_S,
    ExpectedCosts,
    Heartbeat,
    ProgressExecutor,
    cpu_seconds,
    cpu_seconds_with_children,
)

TIMEOUT_S = 30.0


def plan(new: list[str], removed: list[str]) -> SchedulerOutput:
    rows = [NewRequestData(name, [1], 1, SamplingParams(), [[1]], 0) for name in new]
    return SchedulerOutput(step_id=1, new_requests=rows, scheduled=[], removed_request_ids=removed)


def test_parent_reads_the_requests_in_work(tmp_path: Path) -> None:
    parents = ProgressFile.create(tmp_path / "progress", 3)
    cores = ProgressFile(tmp_path / "progress")
    names = ["a", "b-1.0", "größe\udc80", "d" * 10_000]
    assert parents.in_work(names) == set()
    for new, removed, expected in (
        (names[:2], [], set(names[:2])),
        ([], [], set(names[:2])),
        (names[2:], names[:1], set(names[1:])),
        ([], names, set()),
    ):
        cores.begin(plan(new, removed))
        assert parents.in_work(names) == expected
    assert parents.num_turns == 0
    for _ in range(300):
        cores.turn()
    assert parents.num_turns == 300


def looks(heartbeat: Heartbeat, core: Iterator[tuple[int, float | None]], period: float = 0.2) -> float:
    """Seconds until the core counts as hung."""
    now = start = 1000.0
    heartbeat.hangs(now, 0, 0.0)
    for turns, used in core:
        now += period
        if heartbeat.hangs(now, turns, used):
            return now - start
    return float("inf")


@pytest.mark.item(44)
def test_request_of_an_encoded_image_is_in_work_alone(tmp_path: Path) -> None:
    parents, cores = ProgressFile.create(tmp_path / "progress", 2), ProgressFile(tmp_path / "progress")
    names = ["row 1", "row 2", "seeing"]
    cores.begin(plan(names[:2], []))
    cores.encode(names[2:], beside_steps=False)
    assert parents.in_work(names) == {"seeing"}
    cores.encode(names[2:], beside_steps=True)  # as many as the file has room for, the encoded one first
    assert parents.in_work(names) == {"seeing", "row 1"}
    cores.encode((), beside_steps=True)
    assert parents.in_work(names) == {"row 1", "row 2"}


def test_a_core_that_stands_still_hangs_after_the_timeout() -> None:
    after = looks(Heartbeat(TIMEOUT_S), ((1, 5.0) for _ in range(10_000)))
    assert TIMEOUT_S <= after <= TIMEOUT_S + 1


def test_rare_tick_of_a_waiting_thread_is_not_computing() -> None:
    """As the kernel counts, 2.3 and 2.31 seconds, of which floats make a little more than a tick."""
    after = looks(Heartbeat(TIMEOUT_S), ((1, (229 + place) * TICK_S) for place in range(10_000)))
    assert TIMEOUT_S <= after <= TIMEOUT_S + 1


@pytest.mark.item(45)
def test_computing_core_has_longer_after_long_steps() -> None:
    def computing(turn: int, seconds: float) -> Iterator[tuple[int, float]]:
        return ((turn, 0.2 * place) for place in range(int(seconds * 5)))

    assert looks(Heartbeat(TIMEOUT_S), computing(1, 19 * TIMEOUT_S)) == float("inf")
    assert BUSY_FACTOR * TIMEOUT_S <= looks(Heartbeat(TIMEOUT_S), computing(1, 1000)) < 21 * TIMEOUT_S

    def after_a_long_step() -> Iterator[tuple[int, float]]:
        yield from computing(1, 500.0)
        yield from computing(2, 20_000.0)

    after = looks(Heartbeat(TIMEOUT_S), after_a_long_step())
    assert LONGEST_FACTOR * 490 <= after - 500 <= LONGEST_FACTOR * 510


@pytest.mark.item(44, 45)
def test_computing_core_has_its_expected_step_time_and_more() -> None:
    def after(expected_s: float | None, seconds: float) -> float:
        heartbeat, now = Heartbeat(TIMEOUT_S), 0.0
        heartbeat.hangs(now, 1, 0.0, expected_s)
        while now < seconds and not heartbeat.hangs(now, 1, now, expected_s):
            now += 0.2
        return now

    spins = 2 * TIMEOUT_S
    for expected_s, least in ((0.001, spins), (2.0, spins), (20.0, 200.0), (60.0, 600.0), (None, 600.0)):
        assert least <= after(expected_s, 2000) <= least + 1
    assert after(1e6, 2000) <= BUSY_FACTOR * TIMEOUT_S + 1, "never longer than where nothing is known"


def measured(work: list[tuple[int, int, float]]) -> Iterator[tuple[float | None, float]]:
    """For steps of (start, tokens, seconds): what was expected of each while it ran, and what it took."""
    now = 0.0

    class Steps:
        def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            nonlocal now
            expected.append(progress.expected_s)
            now += seconds
            return ModelRunnerOutput(plan.step_id, {})

    with tempfile.TemporaryDirectory() as folder:
        expected: list[float | None] = []
        progress = ProgressFile.create(Path(folder) / "progress", 1)
        executor = ProgressExecutor(Steps(), progress, ExpectedCosts(), lambda: now)  # type: ignore[arg-type]
        for start, tokens, seconds in work:
            executor.execute_model(
                SchedulerOutput(1, [], [ScheduledRequest("a", start, tokens, 1, [[]])], [])
            )
            yield expected[-1], seconds


@pytest.mark.item(45)
@given(
    st.lists(st.tuples(st.integers(0, 2**17), st.integers(1, 2**13)), min_size=2, max_size=20),
    st.floats(0.0, 1.0),
    st.floats(1e-6, 0.1),
    st.floats(0.0, 1e-3),
)
@example([(7167, 1), (0, 11)], 0.0, 0.0625, 0.0)
def test_proportional_step_cost_stays_near_the_expectation(
    steps: list[tuple[int, int]], fixed_s: float, token_s: float, share: float
) -> None:
    """A fixed part, one by tokens, and one by what they look at."""
    costs = [fixed_s + tokens * token_s * (1 + share * (start + tokens)) for start, tokens in steps]
    work = [(start, tokens, cost) for (start, tokens), cost in zip(steps, costs, strict=True)]
    (first, _), *others = measured(work)
    assert first is None
    for expected_s, seconds in others:
        assert expected_s is not None
        assert seconds <= LONGEST_FACTOR * expected_s + 2e-6


@pytest.mark.item(44)
def test_expected_cost_of_known_steps_is_their_time() -> None:
    steps = [(0, 2048, 60.0), *[(2048 + index, 1, 0.05) for index in range(200)], (0, 2000, 55.0)]
    expected = [seconds for seconds, _ in measured(steps)]
    assert expected[-1] == pytest.approx(60.0)
    assert expected[-2] == pytest.approx(0.05)


def test_nothing_is_expected_before_something_is_known(tmp_path: Path) -> None:
    progress = ProgressFile.create(tmp_path / "progress", 1)
    assert progress.expected_s is None
    for seconds in (0.0, 1e-9):
        progress.expect(seconds)
        assert progress.expected_s == 1e-6, "nothing is in work"
    progress.expect(None)
    assert progress.expected_s is None


def test_core_of_unknown_processor_time_counts_as_computing() -> None:
    assert looks(Heartbeat(TIMEOUT_S), ((1, None) for _ in range(10_000))) >= BUSY_FACTOR * TIMEOUT_S


@pytest.mark.item(45)
def test_loading_is_exempt_and_a_timeout_of_0_exempts_everything() -> None:
    assert looks(Heartbeat(TIMEOUT_S), ((0, 0.0) for _ in range(100_000))) == float("inf")
    patient = Heartbeat(0.0)
    assert looks(patient, ((1, 0.0) for _ in range(100_000))) == float("inf")
    assert patient.stalls


def test_idle_core_stalls_until_it_continues() -> None:
    heartbeat, stalls = Heartbeat(TIMEOUT_S), []
    for second in range(10):
        assert not heartbeat.hangs(float(second), 1 + second // 8, 0.0)
        stalls.append(heartbeat.stalls)
    assert stalls == [False] * 6 + [True] * 2 + [False] * 2


def test_delayed_observer_blames_no_core() -> None:
    assert looks(Heartbeat(TIMEOUT_S), ((1, 0.0) for _ in range(25)), period=3600.0) == float("inf")


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 2.0), st.floats(0.0, 25.0)), max_size=40))
def test_a_core_that_turns_within_the_timeout_never_hangs(steps: list[tuple[int, float, float]]) -> None:
    heartbeat, now, turns = Heartbeat(TIMEOUT_S), 0.0, 1
    for num_turns, used, silence in steps:
        turns, now = turns + max(1, num_turns), now + silence
        assert not heartbeat.hangs(now, turns, used)


def test_the_processor_time_of_a_process() -> None:
    before = cpu_seconds(os.getpid())
    assert before is not None
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = cpu_seconds(os.getpid())
    assert after is not None
    assert after - before > 0.05
    assert cpu_seconds(2**22 + 1) is None


def test_process_with_computing_children_uses_a_processor() -> None:
    busy = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo done; read end"
    child = subprocess.Popen(["sh", "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        own, used, together = (
            cpu_seconds(os.getpid()),
            cpu_seconds(child.pid),
            cpu_seconds_with_children(os.getpid()),
        )
        assert own is not None
        assert used is not None
        assert together is not None
        assert used > 0
        assert together >= own + used
    finally:
        child.communicate()
    assert cpu_seconds_with_children(2**22 + 1) is None


@pytest.mark.item(45)
def test_loading_stages_report_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parents, cores = ProgressFile.create(tmp_path / "progress", 2), ProgressFile(tmp_path / "progress")
    now = 1000.0
    monkeypatch.setattr("quire.engine.core_progress.time.monotonic", lambda: now)
    assert str(parents.loading) == "the model is loading: starting"
    cores.note_loading("weights")
    assert str(parents.loading) == "the model is loading: weights"
    now = 1004.0
    cores.note_loading("weights", 10**9, 3 * 10**9)
    assert str(parents.loading) == "the model is loading: weights, 1.00 of 3.00 GB, about 8 s left"
    cores.note_loading("warm_up")
    assert str(parents.loading) == "the model is loading: warm_up"
    cores.note_loading("kv_cache")
    cores.turn()
    assert parents.loading is None
