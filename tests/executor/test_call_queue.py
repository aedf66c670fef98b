# SPDX-License-Identifier: Apache-2.0
import threading

import pytest

from quire.executor.uniproc import CallerQueue, EagerQueue, ThreadQueue


@pytest.fixture(params=[CallerQueue, EagerQueue, ThreadQueue])
def queue(request):
    queue = request.param()
    yield queue
    queue.close()
    queue.close()


def test_calls_run_in_order_and_give_their_results(queue):
    ran = []
    results = [queue.start(lambda number=number: ran.append(number) or number * 2) for number in range(50)]
    assert [result() for result in results] == list(range(0, 100, 2))
    assert ran == list(range(50))


def test_a_failure_surfaces_with_the_result(queue):
    failing = queue.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing()


def test_lane_runs_on_one_thread_while_the_caller_continues():
    queue, caller_went_on = ThreadQueue(), threading.Event()
    first = queue.start(lambda: caller_went_on.wait() and threading.get_ident())
    second = queue.start(threading.get_ident)
    caller_went_on.set()
    assert first() == second() != threading.get_ident()
    queue.close()


def test_an_eager_call_has_run_when_it_is_started():
    ran = []
    EagerQueue().start(lambda: ran.append(1))
    assert ran == [1]


def test_nothing_runs_after_a_failure(queue):
    ran = []
    failing, later = queue.start(lambda: 1 // 0), queue.start(lambda: ran.append("later"))
    for result in (failing, later):
        with pytest.raises(ZeroDivisionError):
            result()
    assert ran == []


def test_close_waits_for_started_calls():
    queue, ran = ThreadQueue(), []
    for number in range(20):
        queue.start(lambda number=number: ran.append(number))
    queue.close()
    assert ran == list(range(20))
