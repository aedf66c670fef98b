# SPDX-License-Identifier: Apache-2.0
"""Tests of the decisions after a core's death, on a fake clock."""

from __future__ import annotations

from quire.engine.supervision import Verdict
from quire.supervision.progress import BACKOFF_S, MAX_DEATHS, WINDOW_S, Supervisor


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_restarts_back_off_and_too_many_deaths_end_the_engine() -> None:
    clock = Clock()
    supervisor = Supervisor(resume=True, clock=clock)
    verdicts = []
    for _ in range(MAX_DEATHS + 1):
        verdicts.append(supervisor.died(0, set(), set()).restart_in_s)
        clock.now += (WINDOW_S - 1) / MAX_DEATHS
    assert verdicts == [*BACKOFF_S, None]
    assert list(BACKOFF_S) == sorted(BACKOFF_S)


def test_deaths_long_ago_do_not_count() -> None:
    clock = Clock()
    supervisor = Supervisor(resume=True, clock=clock)
    for _ in range(20):
        assert supervisor.died(0, set(), set()) == Verdict(0.0)
        clock.now += WINDOW_S


def test_request_in_work_at_two_deaths_is_blamed_waiting_not() -> None:
    clock = Clock()
    supervisor = Supervisor(resume=True, clock=clock)
    everybody = {"poison", "early", "late", "waits"}
    assert supervisor.died(0, everybody, {"poison", "early"}).failed == set()
    clock.now += WINDOW_S
    assert supervisor.died(0, everybody, {"late"}).failed == set(), "blame outlives a death without it"
    clock.now += WINDOW_S
    assert supervisor.died(0, everybody, {"poison", "waits"}).failed == {"poison"}
    clock.now += WINDOW_S
    left = everybody - {"poison"}
    assert supervisor.died(0, left, left).failed == left


def test_request_that_kills_two_cores_is_blamed_ended_forgotten() -> None:
    supervisor = Supervisor(resume=True, clock=Clock())
    assert supervisor.died(0, {"a", "b"}, {"a", "b"}).failed == set()
    assert supervisor.died(1, {"a"}, {"a"}, elsewhere={"b"}).failed == {"a"}
    supervisor.died(0, set(), set(), elsewhere={"b"})
    assert supervisor._blame._suspects == {"b"}


def test_deaths_of_each_core_are_counted_apart() -> None:
    supervisor = Supervisor(resume=True, clock=Clock())
    for delay in BACKOFF_S:
        for core in range(3):
            assert supervisor.died(core, set(), set()).restart_in_s == delay
    assert supervisor.died(1, set(), set()).restart_in_s is None


def test_without_resumption_all_that_the_core_had_ends() -> None:
    supervisor = Supervisor(resume=False, clock=Clock())
    assert supervisor.died(0, {"a", "b"}, {"a"}) == Verdict(0.0, frozenset("ab"))
