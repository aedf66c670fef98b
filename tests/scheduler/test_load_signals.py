"""Signals for autoscalers, under simulated loads from nothing to three times the capacity."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import SchedulerConfig
from quire.scheduler.load_signals import FULL, LoadSignals
from quire.scheduler.output import RequestUpdate
from quire.simulate.load import LoadDescription, SimulatedRequest
from quire.simulate.simulator import Simulator
from tests.simulate.machines import make_machine

LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_num_queued_reqs=50)
COUNTS = st.integers(0, 200)


class Watched(Simulator):
    """Simulator that notes the signals as requests arrive, and how long they then waited."""

    def __init__(self, limit: int = 0) -> None:
        machine = make_machine(max_num_queued_reqs=limit)
        super().__init__(machine.config, machine.cache, machine.costs)
        self.predicted: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self.saturations: list[float] = []

    def _add(self, name: str, request: SimulatedRequest) -> None:
        stats = self._scheduler.stats()
        self.predicted[name] = stats.queue_s
        super()._add(name, request)

    def _record(self, update: RequestUpdate) -> None:
        if update.scheduled_ts:
            self.waited.setdefault(update.request_id, update.scheduled_ts - update.queued_ts)
        super()._record(update)

    def _sample(self) -> None:
        self.saturations.append(self._scheduler.stats().saturation)
        super()._sample()


def load_of(rate: float, num: int = 300) -> list[SimulatedRequest]:
    return LoadDescription(num, rate, "4-20", "5-15", seed=3).requests()


def capacity() -> float:
    """Requests per second that the machine can do."""
    run = Watched().run(load_of(1e6))
    return len(run.requests) / max(one.last_s for one in run.requests)


@pytest.mark.parametrize("times", [1.5, 2.0, 3.0])
def test_predicted_wait_is_within_a_factor_of_two(times: float) -> None:
    watched = Watched()
    watched.run(load_of(times * capacity()))
    later = [name for name in watched.waited if int(name) > 60]  # once the queue has been there for a while
    ratios = [watched.predicted[name] / watched.waited[name] for name in later]
    assert 0.8 < statistics.median(ratios) < 1.25
    assert all(0.5 < ratio < 2.0 for ratio in ratios)


def test_saturation_rises_with_the_load() -> None:
    able, means = capacity(), []
    for times in (0.1, 0.3, 0.6, 0.9, 1.5, 3.0):
        watched = Watched()
        watched.run(load_of(times * able))
        means.append(statistics.fmean(watched.saturations))
    assert means == sorted(means)
    assert means[0] < 0.4
    assert means[-1] > 0.75


@given(st.integers(1, 100), st.integers(0, 4), st.integers(0, 99))
def test_saturation_passes_full_before_a_request_is_refused(limit: int, running: int, waiting: int) -> None:
    signals = LoadSignals(
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=64, max_num_queued_reqs=limit)
    )
    unanswered = running + waiting  # none has a token yet
    if unanswered >= limit:  # the next one is refused
        assert signals.may_refuse(unanswered)
        assert signals.saturation(running, waiting, unanswered, 0.0) >= FULL


@given(COUNTS, COUNTS, COUNTS, st.floats(0.0, 1.0))
def test_saturation_grows_with_every_count(running: int, waiting: int, unanswered: int, usage: float) -> None:
    signals = LoadSignals(LIMITS)
    one = signals.saturation(running, waiting, unanswered, usage)
    assert 0.0 <= one <= 1.0
    assert one <= signals.saturation(running + 1, waiting, unanswered, usage)
    assert one <= signals.saturation(running, waiting + 1, unanswered + 1, usage)


def test_wait_is_unknown_until_a_waiting_request_has_started() -> None:
    signals = LoadSignals(LIMITS)
    signals.note(0.0, 4, 10)
    assert signals.wait_s(10) == 0.0
    signals.note(1.0, 2, 8)
    assert signals.wait_s(8) == pytest.approx(4.0, rel=0.05)
    signals.note(2.0, 0, 0)
    assert signals.wait_s(0) == 0.0


def test_steps_at_one_instant_give_no_infinite_rate() -> None:
    signals = LoadSignals(LIMITS)
    for _ in range(5):
        signals.note(1.0, 1, 3)
    assert signals.wait_s(3) == 0.0
