# SPDX-License-Identifier: Apache-2.0
"""Held requests: they block no other, are released in order of arrival, and are explained."""

import pytest

from quire.scheduler.explain import Cause
from quire.scheduler.holds import Hold
from quire.scheduler.request import RequestStatus
from tests.scheduler.harness import Engine, make_config, run_alone
from tests.scheduler.test_explain import explain, shares, steps

POLICIES = ["fcfs", "priority", "fair"]


def scheduled(engine: Engine) -> list[str]:
    return list(engine.step().num_scheduled_tokens)


def one_row(policy: str = "fcfs") -> Engine:
    return Engine(make_config(max_num_seqs=1, scheduling_policy=policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_held_request_blocks_no_others_and_keeps_its_place(policy):
    engine = one_row(policy)
    engine.add("held", [1, 2], lacks=["x"], max_tokens=1)
    for name in "ab":
        engine.add(name, [1, 2], max_tokens=2)
    assert [scheduled(engine), scheduled(engine)] == [["a"], ["a"]]
    engine.release("x")
    assert scheduled(engine) == ["held"]
    engine.drain()
    assert engine.tokens("b") == run_alone(engine.requests["b"], engine.config).new_token_ids


def test_a_request_is_ready_when_all_that_it_lacks_is_there():
    engine = Engine()
    engine.add("r", [1, 2], lacks=["x", "y", "z"])
    for key in ("y", "x", "unknown", "x"):
        engine.release(key)
        assert scheduled(engine) == []
    engine.release("z")
    assert scheduled(engine) == ["r"]
    engine.drain()


def test_release_of_a_key_releases_all_requests_held_for_it():
    engine = Engine()
    for name, lacks in (("a", "x"), ("b", "xy"), ("c", "x"), ("d", "y")):
        engine.add(name, [1], lacks=lacks)
    engine.release("x")
    assert scheduled(engine) == ["a", "c"]
    engine.release("y")
    assert scheduled(engine) == ["a", "c", "b", "d"]
    engine.drain()


def test_an_engine_that_holds_all_its_requests_has_nothing_to_do():
    engine = Engine()
    engine.add("r", [1, 2], lacks=["x"])
    scheduler = engine.scheduler
    assert (scheduler.has_unfinished_requests(), scheduler.has_work(), scheduler.stats().num_waiting) == (
        True,
        False,
        1,
    )
    engine.release("x")
    assert scheduler.has_work()
    engine.drain()


def test_a_held_request_can_end_and_leaves_nothing():
    engine = Engine()
    for name in "ab":
        engine.add(name, [1, 2], lacks=["x", "y"])
    assert [update.finish_reason for update in engine.abort("a")] == ["abort"]
    engine.release("x")
    engine.abort("b")
    engine.release("y")
    engine.drain()
    assert not engine.scheduler.has_unfinished_requests()


def test_a_child_of_a_held_parent_waits_for_both():
    engine = Engine(make_config(enable_prefix_caching=False))
    engine.add("p", range(9), lacks=["x"])
    engine.add("c", range(9), lacks=["y"], fork_of="p")
    engine.add("d", range(9), fork_of="p")
    assert scheduled(engine) == []
    engine.release("x")
    assert [scheduled(engine), scheduled(engine)] == [["p"], ["p", "d"]]
    engine.release("y")
    assert engine.step().num_scheduled_tokens == {"p": 1, "d": 1, "c": 1}, "it forks all the same"
    engine.drain()


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_and_held_request_resumes_when_released(policy):
    engine = Engine(make_config(scheduling_policy=policy, enable_prefix_caching=False))
    for name in "ab":
        engine.add(name, range(8), max_tokens=12)
    steps(engine, 3)
    assert not engine.hold("a", "x"), "it runs"
    engine.scheduler._queues.preempt_last(engine.requests["a"], engine.now)
    assert engine.hold("b", "x")
    steps(engine, 2)
    assert (engine.requests["b"].status, explain(engine, "b").cause) == (RequestStatus.PREEMPTED, "not_ready")
    engine.release("x")
    assert explain(engine, "b").cause == "preempted"
    steps(engine, 1)
    assert shares(engine, "b") == {"next_step": 1, "preempted": 1, "not_ready": 2}
    engine.drain()
    for request in engine.requests.values():
        assert engine.tokens(request.request_id) == run_alone(request, engine.config).new_token_ids


def test_holds_are_explained_one_after_the_other():
    engine = one_row()
    engine.add("running", [1], max_tokens=20)
    engine.add("r", [1, 2], lacks=["its adapter"])
    engine.scheduler.hold("r", Hold("prompt", Cause.SHARED_PROMPT), engine.now)
    steps(engine, 3)
    assert (explain(engine, "r").cause, explain(engine, "r").num_ahead) == ("not_ready", 0)
    assert "3.000 s  for its adapter to be ready" in str(explain(engine, "r"))
    engine.release("its adapter")
    steps(engine, 2)
    engine.release("prompt")
    steps(engine, 2)
    assert shares(engine, "r") == {"not_ready": 3, "shared_prompt": 2, "next_step": 1, "sequence_cap": 1}
    engine.drain()


def test_late_released_request_is_not_overtaken_before_release():
    engine = one_row("priority")
    for name in ("late 1", "late 2"):
        engine.add(name, [2], lacks=["x"])
    engine.add("urgent", [3], priority=-8, max_tokens=9)
    steps(engine, 2)
    engine.release("x")
    engine.add("last", [4])
    steps(engine, 1)
    causes = [explain(engine, name).cause for name in ("late 1", "late 2", "last")]
    assert causes == ["sequence_cap", "behind", "behind"], "the urgent one ran before they were ready"
    engine.drain()


def test_late_released_request_is_overtaken_by_a_later_arrival():
    engine = one_row("priority")
    engine.add("running", [1], priority=-9, max_tokens=3)
    for name in ("late 1", "late 2"):
        engine.add(name, [2], lacks=["x"])
    engine.add("urgent", [3], priority=-8, max_tokens=9)
    engine.add("last", [4])
    steps(engine, 2)
    engine.release("x")
    steps(engine, 3)
    assert engine.requests["urgent"].status is RequestStatus.RUNNING
    causes = [explain(engine, name).cause for name in ("late 1", "late 2", "last")]
    assert causes == ["sequence_cap", "lower_priority", "behind"]
    engine.drain()
