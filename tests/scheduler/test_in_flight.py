# SPDX-License-Identifier: Apache-2.0
"""Planning ahead of results: placeholders, late stops, preemption and ids, one race at a time.

That any mixture of them changes no output is the business of tests/engine/test_state_machine.py.
"""

from collections import deque
from itertools import pairwise

import msgspec
import pytest

from quire.kv_cache.manager import IntegrityError
from quire.scheduler.request import RequestStatus
from tests.scheduler.harness import Engine, make_config, run_alone


class Pipeline(Engine):
    """Plans and results, each when the test says so."""

    def __init__(self, config=None, **fields):
        super().__init__(config, **fields)
        self.in_flight = deque()

    def launch(self):
        """Plan a step and hand it over."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        self.plans.append(plan)
        if not plan.is_empty:
            self.executor.submit(plan)
            self.in_flight.append(plan)
        return plan

    def land(self, **changes):
        """Take in the oldest result."""
        output = msgspec.structs.replace(self.executor.collect(), **changes)
        self.finish_step(self.in_flight.popleft(), output)

    def land_all(self):
        while self.in_flight:
            self.land()

    def drain(self, max_steps=1000):
        self.land_all()
        super().drain(max_steps)


def tokens_alone(prompt, **params):
    engine = Engine()
    request = engine.add("alone", prompt, **{"max_tokens": 20, **params})
    return run_alone(request, engine.config).new_token_ids


def scheduled(plan):
    return plan.num_scheduled_tokens


def test_tokens_that_are_being_sampled_are_planned():
    engine = Pipeline()
    engine.add("a", range(6))
    engine.add("b", range(10, 25))
    assert scheduled(engine.launch()) == {"a": 6, "b": 10}
    assert scheduled(engine.launch()) == {"a": 1, "b": 5}
    plan = engine.launch()
    assert scheduled(plan) == {"a": 1, "b": 1}
    assert [request.start for request in plan.scheduled] == [7, 15]
    engine.land_all()
    assert engine.tokens("a") == tokens_alone(range(6))[:3]
    assert engine.tokens("b") == tokens_alone(range(10, 25))[:2]
    engine.drain()


@pytest.mark.parametrize("limit", [{"max_tokens": 3}, {"max_tokens": None}])
def test_nothing_is_planned_past_a_limit(limit):
    engine = Pipeline(make_config(max_model_len=9))
    engine.add("a", range(6), **limit)
    assert [scheduled(engine.launch()) for _ in range(4)] == [{"a": 6}, {"a": 1}, {"a": 1}, {}]
    engine.land_all()
    assert (engine.last("a").finish_reason, len(engine.tokens("a"))) == ("length", 3)
    engine.drain()


def test_an_empty_plan_has_no_result():
    engine = Pipeline()
    assert engine.launch().is_empty
    assert not engine.scheduler.has_work()
    engine.add("a", [1], max_tokens=1)
    engine.launch()
    assert engine.launch().is_empty
    assert engine.scheduler.has_work()
    engine.land()
    engine.drain()


def test_tokens_computed_after_a_late_stop_are_dropped():
    full = tokens_alone(range(5))
    engine = Pipeline()
    engine.add("a", range(5), max_tokens=20, stop_token_ids=[full[2]])
    for _ in range(6):
        engine.launch()
    engine.land_all()
    assert engine.tokens("a") == full[:3]
    assert engine.last("a").finish_reason == "stop"
    assert engine.scheduler.stats().kv_cache_usage == 0.0
    assert engine.launch().removed_request_ids == ["a"]
    engine.drain()


def test_blocks_of_a_late_stop_are_reused_while_in_flight():
    full = tokens_alone(range(5))
    engine = Pipeline(make_config(num_gpu_blocks_override=7, enable_prefix_caching=False))
    engine.add("a", range(5), max_tokens=18, stop_token_ids=[full[1]])
    for _ in range(5):
        engine.launch()
    engine.land()
    engine.land()
    other = engine.add("b", range(30, 47))
    plan = engine.launch()
    assert set(plan.new_requests[0].block_ids[0]) & {1, 2}, "the blocks of `a`"
    engine.land_all()
    engine.drain()
    assert engine.tokens("b") == run_alone(other, engine.config).new_token_ids


def test_a_block_filled_by_a_surplus_token_is_not_cached():
    full = tokens_alone(range(6))
    engine = Pipeline()
    engine.add("a", range(6), max_tokens=20, stop_token_ids=[full[1]])
    for _ in range(4):
        engine.launch()
    engine.land_all()
    engine.add("b", [*range(6), *full[:2], 1])
    engine.drain()
    assert engine.last("b").num_cached_tokens == 4, "the second block's last token is the stop"


def preempt_in_flight(stop_token_ids=(), num_host_blocks=0):
    """`b` has lost its blocks to `a` while steps in flight sample for it; returns the engine and b's tokens alone."""
    config = make_config(num_gpu_blocks_override=8, enable_prefix_caching=False)
    engine = Pipeline(config, num_host_blocks=num_host_blocks)
    engine.add("a", range(8), max_tokens=18)
    engine.add("b", range(17, 25), max_tokens=18, stop_token_ids=stop_token_ids)
    for _ in range(3):
        engine.launch()
    while engine.requests["b"].status is not RequestStatus.PREEMPTED:
        engine.launch()
        engine.land()
    assert engine.requests["b"].num_placeholder_tokens == 2
    return engine, tokens_alone(range(17, 25), max_tokens=18)


def test_a_preempted_request_waits_for_its_steps_in_flight():
    engine, alone = preempt_in_flight()
    engine.abort("a")
    num_known = len(engine.tokens("b"))
    for _ in range(2):
        assert scheduled(engine.launch()) == {}, "there is room, but not all its tokens are in"
        while "b" not in engine.in_flight[0].num_scheduled_tokens:
            engine.land()
        engine.land()
    (data,) = engine.launch().new_requests
    assert data.token_ids == [*range(17, 25), *alone[: num_known + 2]]
    engine.drain()
    assert engine.tokens("b") == alone


def test_stop_received_after_a_preemption_ends_the_request():
    engine, alone = preempt_in_flight()
    stop = alone[len(engine.tokens("b"))]
    engine, _ = preempt_in_flight([stop])
    num_known = len(engine.tokens("b"))
    engine.drain()
    assert engine.tokens("b") == alone[: num_known + 1]
    assert engine.last("b").num_preemptions == 1


def test_tokens_of_in_flight_steps_are_swapped_out_with_the_rest():
    """Two of b's tokens are written after its swap-out was planned, and before it is executed."""
    engine, alone = preempt_in_flight(num_host_blocks=8)
    num_known = len(engine.tokens("b"))
    engine.abort("a")
    engine.land_all()
    plan = engine.launch()
    (data,) = plan.new_requests
    assert len(engine.tokens("b")) == num_known + 2
    assert data.num_computed_tokens == len(data.token_ids) - 1 == 8 + num_known + 1
    assert len(plan.swap_ins) == -(-data.num_computed_tokens // 4)
    engine.drain()
    assert engine.tokens("b") == alone
    assert engine.scheduler.stats().num_swaps == 1


def test_a_stop_that_comes_in_after_a_swap_frees_the_host_blocks():
    engine, alone = preempt_in_flight(num_host_blocks=8)
    stop = alone[len(engine.tokens("b"))]
    engine, _ = preempt_in_flight([stop], num_host_blocks=8)
    assert engine.scheduler.stats().host_cache_usage > 0.0
    engine.land_all()
    assert engine.last("b").finish_reason == "stop"
    assert engine.scheduler.stats().host_cache_usage == 0.0
    engine.drain()


def test_child_forks_from_a_parent_with_steps_in_flight():
    engine = Pipeline(make_config(enable_prefix_caching=False))
    for name, parent in (("p", None), ("c", "p")):
        engine.add(name, range(14), max_tokens=12, fork_of=parent)
    assert scheduled(engine.launch()) == {"p": 14}
    engine.launch()
    assert scheduled(engine.launch()) == {"p": 1}, (
        "the child waits until it is known that the prompt is computed"
    )
    engine.land()
    plan = engine.launch()
    assert (scheduled(plan), len(plan.block_copies)) == ({"p": 1, "c": 1}, 1)
    engine.drain()
    for name in "pc":
        assert engine.tokens(name) == run_alone(engine.requests[name], engine.config).new_token_ids


def test_results_of_an_aborted_request_spare_its_reused_id():
    engine = Pipeline()
    engine.add("a", range(5))
    engine.launch()
    engine.launch()
    engine.abort("a")
    request = engine.add("a", range(20, 27))
    plan = engine.launch()
    assert (plan.removed_request_ids, scheduled(plan)) == (["a"], {"a": 7})
    engine.launch()
    engine.land()
    engine.land()
    assert engine.updates["a"] == []
    engine.drain()
    assert engine.tokens("a") == run_alone(request, engine.config).new_token_ids


def test_a_failure_costs_the_steps_that_were_planned_meanwhile():
    engine = Pipeline()
    engine.add("a", range(5), max_tokens=20)
    for _ in range(3):
        engine.launch()
    engine.land(sampled_token_ids={}, failed={"a": "numbers went bad"})
    assert engine.last("a").error == "numbers went bad"
    engine.land_all()
    assert len(engine.updates["a"]) == 1
    engine.drain()


def test_prefix_cache_reset_works_with_only_surplus_steps():
    engine = Pipeline()
    engine.add("a", range(9))
    engine.launch()
    engine.launch()
    assert not engine.scheduler.reset_prefix_cache()
    engine.land()
    engine.abort("a")
    assert engine.scheduler.reset_prefix_cache()
    engine.add("b", range(9))
    engine.drain()
    assert engine.last("b").num_cached_tokens == 0


def test_a_step_that_was_interrupted_costs_its_requests_only():
    engine = Pipeline()
    engine.add("a", range(5))
    engine.launch()
    engine.executor.collect()
    engine.in_flight.clear()
    engine.abort("a")
    request = engine.add("b", range(9))
    engine.drain()
    assert engine.tokens("b") == run_alone(request, engine.config).new_token_ids


def test_integrity_covers_the_steps_in_flight():
    engine = Pipeline()
    engine.add("a", [1]).num_steps_in_flight += 1
    with pytest.raises(IntegrityError, match="miscounts its steps in flight"):
        engine.scheduler.check_integrity()


def two_parts(**fields):
    return make_config(pipeline_parallel_size=2, max_steps_in_flight=2, **fields)


def test_steps_of_stages_have_half_of_the_requests_each():
    """Waiting requests are split too; one whose token is in flight is in no other step, whatever the room."""
    engine = Pipeline(two_parts())
    for name in "abcd":
        engine.add(name, range(3))
    plans = [scheduled(engine.launch()) for _ in range(3)]
    assert plans == [{"a": 3, "b": 3}, {"c": 3, "d": 3}, {}]
    for expected in ({"a": 1, "b": 1}, {"c": 1, "d": 1}) * 2:
        engine.land()
        assert scheduled(engine.launch()) == expected
    engine.scheduler.finish_requests(["b", "d"], "abort", engine.now)
    engine.land()
    assert scheduled(engine.launch()) == {"a": 1}
    engine.land()
    assert scheduled(engine.launch()) == {"c": 1}
    engine.drain()


def test_chunks_of_a_prompt_follow_each_other_through_stages():
    engine = Pipeline(two_parts(max_num_batched_tokens=5))
    engine.add("a", range(12))
    assert [scheduled(engine.launch()) for _ in range(4)] == [{"a": 5}, {"a": 5}, {"a": 2}, {}]
    engine.land_all()
    assert scheduled(engine.launch()) == {"a": 1}


def test_uneven_steps_leave_no_request_behind():
    engine = Pipeline(two_parts(max_num_seqs=9))
    for name in "abcdef":
        engine.add(name, range(2), max_tokens=2 if name in "abc" else 8)
    engine.launch(), engine.launch()
    sizes = []
    while engine.in_flight:
        engine.land()
        sizes.append(len(scheduled(engine.launch())))
    assert all(one + other == 3 for one, other in pairwise(sizes[3:-4])), sizes
