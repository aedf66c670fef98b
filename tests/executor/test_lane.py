# SPDX-License-Identifier: Apache-2.0
import threading

import pytest

from quire.executor.uniproc import CallerLane, EagerLane, ThreadLane


@pytest.fixture(params=[CallerLane, EagerLane, ThreadLane])
def lane(request):
    lane = request.param()
    yield lane
    lane.close()
    lane.close()


def test_calls_run_in_order_and_give_their_results(lane):
    ran = []
    results = [lane.start(lambda number=number: ran.append(number) or number * 2) for number in range(50)]
    assert [result() for result in results] == list(range(0, 100, 2))
    assert ran == list(range(50))


def test_a_failure_surfaces_with_the_result(lane):
    failing = lane.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing()


def test_lane_runs_on_one_thread_while_the_caller_continues():
    lane, caller_went_on = ThreadLane(), threading.Event()
    first = lane.start(lambda: caller_went_on.wait() and threading.get_ident())
    second = lane.start(threading.get_ident)
    caller_went_on.set()
    assert first() == second() != threading.get_ident()
    lane.close()


def test_an_eager_call_has_run_when_it_is_started():
    ran = []
    EagerLane().start(lambda: ran.append(1))
    assert ran == [1]


def test_nothing_runs_after_a_failure(lane):
    ran = []
    failing, later = lane.start(lambda: 1 // 0), lane.start(lambda: ran.append("later"))
    for result in (failing, later):
        with pytest.raises(ZeroDivisionError):
            result()
    assert ran == []


def test_closing_waits_for_what_was_started():
    lane, ran = ThreadLane(), []
    for number in range(20):
        lane.start(lambda number=number: ran.append(number))
    lane.close()
    assert ran == list(range(20))
