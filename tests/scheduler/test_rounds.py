# SPDX-License-Identifier: Apache-2.0
"""Rounds: when a plan lets requests generate several tokens, how many, and what these leave behind.

That no mixture of them changes an output is the business of the state machine in tests/engine.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.scheduler.output import SchedulerOutput
from quire.scheduler.request import RequestStatus
from tests.fixtures.asserts import about_an_assert
from tests.fixtures.folded import folded
from tests.scheduler.harness import Engine, make_config, run_alone

PROMPT = range(6)


def engine_of(num_rounds=4, **args):
    """One whose plans allow several rounds; nothing is found in a cache, so prompts are computed."""
    return Engine(make_config(num_scheduler_steps=num_rounds, enable_prefix_caching=False, **args))


def with_all_rounds(engine):
    """The engine, whose executor takes all rounds that a plan allows, where it takes any number by default."""
    engine.executor._num_decode_steps = lambda plan: plan.max_decode_steps
    return engine


def as_alone(engine, name):
    """Whether a request has got what it gets alone, by a plan for each token."""
    return engine.tokens(name) == run_alone(engine.requests[name], engine.config).new_token_ids


def test_single_generating_request_gets_several_tokens_per_plan():
    engine = with_all_rounds(engine_of())
    request = engine.add("a", PROMPT, max_tokens=30)
    assert engine.step().max_decode_steps == 1, "the prompt"
    while not request.is_finished:
        before = request.num_tokens
        plan = engine.step()
        assert plan.max_decode_steps == min(4, 36 - before)
        (scheduled,) = plan.scheduled
        assert (scheduled.num_tokens, scheduled.num_samples) == (1, 1)
        assert request.num_tokens == before + plan.max_decode_steps
        assert request.is_finished or request.num_computed_tokens == request.num_tokens - 1
    assert engine.last("a").finish_reason == "length"
    assert len(engine.plans) < 30
    assert as_alone(engine, "a")


def test_rounds_are_limited_by_the_request_with_fewest_left():
    engine = engine_of(8)
    engine.add("a", PROMPT, max_tokens=30)
    engine.add("b", PROMPT, max_tokens=3)
    engine.step()
    assert engine.step().max_decode_steps == 2
    engine.drain()
    assert as_alone(engine, "a")
    assert as_alone(engine, "b")


def test_a_context_that_ends_is_such_a_limit():
    engine = engine_of(8, max_model_len=10)
    engine.add("a", PROMPT, max_tokens=None)
    engine.step()
    assert engine.step().max_decode_steps == 3
    engine.drain()
    assert len(engine.tokens("a")) == 4


def test_single_round_while_a_request_waits_or_prefills():
    engine = engine_of(max_num_seqs=2)
    engine.add("a", PROMPT, max_tokens=40)
    engine.step()
    assert engine.step().max_decode_steps == 4
    engine.add("b", range(40), max_tokens=40)
    prompt_steps = [engine.step().max_decode_steps for _ in range(3)]
    assert prompt_steps == [1, 1, 1]
    assert engine.step().max_decode_steps == 4, "both generate"
    engine.add("c", PROMPT, max_tokens=1)
    assert engine.step().max_decode_steps == 1, "there is no row for the third"
    engine.drain()
    assert all(as_alone(engine, name) for name in "abc")


def test_held_request_does_not_limit_rounds():
    engine = engine_of()
    engine.add("a", PROMPT, max_tokens=40)
    engine.add("b", PROMPT, ["grammar"], max_tokens=40)
    engine.step()
    assert engine.step().max_decode_steps == 4
    engine.release("grammar")
    assert engine.step().max_decode_steps == 1
    engine.drain()
    assert all(as_alone(engine, name) for name in "ab")


def test_further_rounds_have_own_blocks_and_preempt_no_request():
    engine = engine_of(8, num_gpu_blocks_override=1 + 8)
    requests = [engine.add(name, range(7), max_tokens=9) for name in "ab"]
    engine.step()
    assert engine.step().max_decode_steps == 8, "each needs two blocks more, and there are four"
    engine = engine_of(8, num_gpu_blocks_override=1 + 5)
    requests = [engine.add(name, range(7), max_tokens=5) for name in "ab"]
    engine.step()
    assert engine.step().max_decode_steps == 1, "there is one block for both"
    assert [request.status for request in requests] == [RequestStatus.RUNNING] * 2
    engine.drain()
    assert all(as_alone(engine, name) for name in "ab")


def test_tokens_behind_a_stop_are_dropped():
    alone = engine_of(1)
    alone.add("a", PROMPT, max_tokens=30)
    alone.drain()
    for place, token_id in enumerate(alone.tokens("a")[:12]):
        engine = engine_of(8)
        engine.add("a", PROMPT, max_tokens=30, stop_token_ids=[token_id])
        engine.drain()
        first = alone.tokens("a").index(token_id)
        assert engine.tokens("a") == alone.tokens("a")[: first + 1], place
        assert engine.last("a").stop_reason == token_id


def test_prefixes_that_rounds_have_computed_are_found():
    engine = Engine(make_config(num_scheduler_steps=8))
    engine.add("a", PROMPT, max_tokens=20)
    engine.drain()
    text = [*PROMPT, *engine.tokens("a")]
    engine.add("b", text[:22], max_tokens=5)
    engine.drain()
    assert engine.last("b").num_cached_tokens == 20
    assert engine.tokens("b")[:4] == text[22:26]


def test_tenants_are_charged_for_multi_step_tokens():
    costs = {}
    for num_rounds in (1, 8):
        engine = engine_of(num_rounds, scheduling_policy="fair")
        engine.add("a", PROMPT, max_tokens=20, tenant="one")
        engine.drain()
        tenants = engine.scheduler._queues.policy._tenants
        costs[num_rounds] = tenants["one"].counter
    assert costs[1] == costs[8]


class TimedEngine(Engine):
    """An engine of which each plan takes a time that the test says.

    Attributes:
        round_s: measured seconds of a round in the last plan that only decoded; None until there was one.
    """

    round_s: float | None = None

    def take(self, seconds_per_round: float) -> SchedulerOutput:
        """Execute a plan that takes so long for each of its rounds, after a second of nothing."""
        plan = self.schedule()
        if plan.is_empty:
            return plan
        output = self.executor.execute_model(plan)
        took_s = seconds_per_round * max(map(len, output.sampled_token_ids.values()), default=1)
        self.now += took_s
        self.collect(self.scheduler.update_from_output(plan, output, self.now))
        if plan.scheduled and all(one.num_tokens == one.num_samples == 1 for one in plan.scheduled):
            self.round_s = seconds_per_round
        return plan


@folded(("round_s", "expected"), [(0.0005, 8), (0.0025, 8), (0.0026, 7), (0.009, 2), (0.011, 1), (3.0, 1)])
def test_a_plan_has_rounds_that_are_expected_to_end_in_time(round_s, expected):
    engine = with_all_rounds(TimedEngine(make_config(num_scheduler_steps=8, max_multi_step_s=0.02)))
    engine.add("a", PROMPT, max_tokens=50)
    engine.take(5.0)
    assert engine.take(round_s).max_decode_steps == 8, "no step that only decodes has been measured"
    assert engine.take(round_s).max_decode_steps == expected
    engine.take(0.0)
    assert engine.take(0.0).max_decode_steps == 8, "steps have become short again"
    engine.drain()
    assert as_alone(engine, "a")


def test_unused_decode_rounds_are_seldom_planned():
    engine = engine_of(4)
    engine.executor._num_decode_steps = lambda plan: 1  # as of a request with logprobs
    engine.add("a", PROMPT, max_tokens=40)
    engine.step()
    assert [engine.step().max_decode_steps for _ in range(11)] == [4, 1, 1, 1, 1] * 2 + [4]
    with_all_rounds(engine)
    assert [engine.step().max_decode_steps for _ in range(6)] == [1, 1, 1, 1, 4, 4]
    engine.drain()
    assert as_alone(engine, "a")


def pace(engine: Engine, name: str = "a") -> str:
    explanation = engine.scheduler.explain(name, engine.now)
    assert explanation is not None
    assert explanation.pace in str(explanation)
    return explanation.pace


def test_explanation_has_pace_and_round_bound():
    engine = with_all_rounds(TimedEngine(make_config(num_scheduler_steps=8, max_multi_step_s=0.02)))
    engine.add("a", PROMPT, max_tokens=30)
    assert pace(engine) == "", "it has not started"
    engine.take(0.001)
    assert (
        pace(engine) == "up to 1 token of each request per plan: a prompt is computed, or drafts are verified"
    )
    engine.take(0.006)
    assert pace(engine) == "up to 8 tokens of each request per plan: the most of --num-scheduler-steps"
    engine.take(0.006)
    assert pace(engine).endswith(
        "3 tokens of each request per plan: a step takes 6.0 ms, and all of them may take 20 (--max-multi-step-s)"
    )
    engine.add("b", PROMPT, max_tokens=30)
    engine.take(0.006)
    assert "1 token of each" in pace(engine)
    engine.drain()
    assert pace(engine) == "", "it has ended"


def test_pace_excludes_a_request_from_multi_step_decode():
    engine = engine_of(4)
    engine.executor._num_decode_steps = lambda plan: 1  # as of a request with logprobs
    engine.add("a", PROMPT, max_tokens=40)
    for _ in range(3):
        engine.step()
    assert pace(engine).endswith("multi-step decode cannot do, such as logprobs, penalties or a grammar")
    engine.drain()


def test_request_that_ends_in_a_first_round_makes_no_plan_single():
    engine = with_all_rounds(engine_of(4))
    engine.add("a", PROMPT, max_tokens=40)
    engine.add("b", PROMPT, max_tokens=40)
    engine.step()
    plan = engine.schedule()
    output = engine.executor.execute_model(plan)
    stop = output.sampled_token_ids["b"][0]
    engine.requests["b"].sampling_params = engine.requests["b"].sampling_params.clone(stop_token_ids=[stop])
    del output.sampled_token_ids["a"][1:], output.sampled_token_ids["b"][1:]
    engine.finish_step(plan, output)
    assert engine.requests["b"].is_finished
    assert engine.schedule().max_decode_steps == 4


arrivals = st.tuples(
    st.integers(1, 30), st.integers(1, 20), st.lists(st.integers(0, 39), max_size=3), st.booleans()
)
events = st.one_of(
    st.tuples(st.just("add"), arrivals),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("release"), st.none()),
    st.tuples(st.just("take"), st.sampled_from([0.0, 0.001, 0.003, 0.008, 0.019, 0.03])),
    st.tuples(st.just("take"), st.sampled_from([0.001, 0.002])),
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(events, max_size=60), st.sampled_from([2, 4]), st.sampled_from([17, 65]))
def test_bursts_delay_no_request_and_change_no_token(
    happens: list[tuple[str, Any]], max_num_seqs: int, num_blocks: int
) -> None:
    """Requests come, are held, stop and are aborted, and steps take any time; a clock that the test moves."""
    limits = {"max_num_seqs": max_num_seqs, "num_gpu_blocks_override": num_blocks}
    engine = TimedEngine(make_config(num_scheduler_steps=16, max_multi_step_s=0.02, **limits))
    aborted = set[str]()
    for kind, detail in happens:
        if kind == "add":
            length, max_tokens, stops, is_held = detail
            name, lacks = f"r{len(engine.requests)}", ["grammar"] if is_held else []
            engine.add(name, range(length), lacks, max_tokens=max_tokens, stop_token_ids=stops)
        elif kind == "abort":
            engine.abort(f"r{detail}")
            aborted.add(f"r{detail}")
        elif kind == "release":
            engine.release("grammar")
        else:
            check_plan(engine, detail)
    engine.release("grammar")
    while engine.scheduler.has_work():
        check_plan(engine, 0.002)
    for name in engine.requests.keys() - aborted:
        assert as_alone(engine, name)


def check_plan(engine: TimedEngine, seconds_per_round: float) -> None:
    """A plan of several rounds is of all that is ready, decodes only, and is expected to end in time."""
    ready = {
        name
        for name, request in engine.requests.items()
        if not request.is_finished and not engine.lacks[name]
    }
    expected_s = engine.round_s or 0.0
    plan = engine.take(seconds_per_round)
    if plan.max_decode_steps > 1:
        assert set(plan.num_scheduled_tokens) == ready, "a request waits"
        assert all(one.num_tokens == one.num_samples == 1 for one in plan.scheduled), "a prompt is computed"
        assert plan.max_decode_steps * expected_s <= 0.02


@about_an_assert
def test_more_tokens_than_rounds_are_noticed():
    engine = engine_of(2)
    engine.add("a", PROMPT, max_tokens=20)
    engine.step()
    plan = engine.schedule()
    output = engine.executor.execute_model(plan)
    output.sampled_token_ids["a"] += [1, 1]
    with pytest.raises(AssertionError, match="for 2 samples"):
        engine.finish_step(plan, output)
