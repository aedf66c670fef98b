# SPDX-License-Identifier: Apache-2.0
"""Drafts: planned behind the last token, verified, kept or taken back, one case at a time.

That no mixture of them changes an output is the business of the state machines here and in tests/engine.
"""

import msgspec
import pytest

from quire.errors import EngineError
from quire.scheduler.output import STEP_PROTOCOL_VERSION
from tests.fixtures.asserts import about_an_assert
from tests.scheduler.harness import VOCAB_SIZE, make_config, run_alone
from tests.scheduler.test_in_flight import Pipeline, tokens_alone

PROMPT = range(6)
RIGHT = tokens_alone(PROMPT)
"""What follows the prompt."""


def wrong(token):
    return (token + 1) % VOCAB_SIZE


def proposing(drafts, engine=None, **params):
    """An engine whose request has computed its prompt, and got these drafts with its first token."""
    engine = engine or Pipeline()
    request = engine.add("a", PROMPT, **{"max_tokens": 20, **params})
    engine.launch()
    engine.land(draft_token_ids={"a": drafts})
    return engine, request


def test_plan_names_sampled_rows():
    engine, _ = proposing(RIGHT[1:4])
    (scheduled,) = engine.launch().scheduled
    assert (scheduled.start, scheduled.num_tokens, scheduled.num_samples) == (6, 4, 4)
    assert scheduled.draft_token_ids == RIGHT[1:4]


@pytest.mark.parametrize("num_right", range(4))
def test_accepted_drafts_count_as_computed_and_others_never_were(num_right):
    drafts = [*RIGHT[1 : 1 + num_right], *map(wrong, RIGHT[1 + num_right : 4])]
    engine, request = proposing(drafts)
    engine.launch()
    engine.land()
    assert engine.tokens("a") == RIGHT[: 2 + num_right]
    assert request.num_computed_tokens == request.num_tokens - 1
    engine.drain()
    assert engine.tokens("a") == RIGHT


def test_accepted_drafts_are_recomputed_if_a_state_is_kept():
    engine, request = proposing(RIGHT[1:4], Pipeline(num_groups=2, kinds=("full", "state 2")))
    engine.launch()
    engine.land()
    assert (request.num_tokens, request.num_computed_tokens) == (6 + 5, 6 + 1)
    (scheduled,) = engine.launch().scheduled
    assert (scheduled.start, scheduled.num_tokens, scheduled.num_samples) == (7, 4, 1)
    engine.drain()
    assert engine.tokens("a") == RIGHT


def test_a_request_with_drafts_in_flight_is_not_planned():
    engine, _ = proposing(RIGHT[1:3])
    engine.launch()
    assert engine.launch().is_empty
    engine.land()
    assert len(engine.launch().scheduled) == 1


def test_drafts_stand_behind_a_token_that_is_in_flight():
    engine = Pipeline()
    engine.add("a", PROMPT, max_tokens=20)
    engine.launch()
    engine.launch()
    engine.land(draft_token_ids={"a": RIGHT[1:4]})
    (scheduled,) = engine.launch().scheduled
    assert (scheduled.start, scheduled.draft_token_ids) == (7, RIGHT[2:4])
    engine.land_all()
    assert engine.tokens("a") == RIGHT[:5]


@pytest.mark.parametrize(("limits", "num_drafts"), [({"max_tokens": 4}, 2), ({"max_tokens": 1}, None)])
def test_no_draft_reaches_past_a_limit(limits, num_drafts):
    engine, _ = proposing(RIGHT[1:9], **limits)
    scheduled = engine.launch().scheduled
    assert [len(request.draft_token_ids) for request in scheduled] == (
        [] if num_drafts is None else [num_drafts]
    )
    engine.drain()
    assert engine.tokens("a") == RIGHT[: limits["max_tokens"]]


def test_no_draft_reaches_past_the_context():
    engine, _ = proposing(RIGHT[1:9], Pipeline(make_config(max_model_len=10)))
    assert engine.launch().scheduled[0].num_tokens == 3
    engine.drain()
    assert engine.tokens("a") == RIGHT[:4]


def test_drafts_use_the_rest_of_the_budget():
    engine, _ = proposing(RIGHT[1:9], Pipeline(make_config(max_num_batched_tokens=7)))
    engine.add("b", range(20, 24), max_tokens=20)
    assert engine.launch().num_scheduled_tokens == {"a": 7}
    engine.land()
    assert engine.launch().num_scheduled_tokens == {"a": 2, "b": 4}


def test_draft_preempts_no_request():
    """Blocks of 4 tokens: 5 for `b` to its end, and 2 for what `a` has."""
    engine = Pipeline(make_config(num_gpu_blocks_override=8, max_num_batched_tokens=32))
    engine.add("b", range(20, 37), max_tokens=3)
    proposing(RIGHT[1:9], engine)
    plan = engine.launch()
    assert {request.request_id: request.num_samples for request in plan.scheduled} == {"b": 1, "a": 1}
    engine.drain()
    assert engine.scheduler.stats().num_preemptions == 0
    assert engine.tokens("a") == RIGHT


def test_tokens_behind_a_stop_are_dropped():
    engine, _ = proposing(RIGHT[1:5], stop_token_ids=[RIGHT[3]], logprobs=0)
    engine.launch()
    engine.land()
    assert engine.tokens("a") == RIGHT[:4]
    assert (engine.last("a").finish_reason, engine.last("a").stop_reason) == ("stop", RIGHT[3])
    assert len(engine.last("a").logprobs) == 3


@pytest.mark.parametrize(("num_right", "num_cached"), [(0, 4), (1, 8), (4, 8), (5, 12)])
def test_only_accepted_drafts_enter_the_prefix_cache(num_right, num_cached):
    """Blocks of 4 tokens: 6 of the prompt, the first token, and the accepted ones."""
    engine, request = proposing([*RIGHT[1 : 1 + num_right], wrong(RIGHT[1 + num_right])])
    engine.launch()
    engine.land()
    engine.abort("a")
    engine.add("b", [*request.token_ids, 7])
    engine.launch()
    engine.land()
    assert engine.last("b").num_cached_tokens == num_cached
    engine.drain()


@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_request_preempted_with_drafts_in_flight_keeps_tokens(num_host_blocks):
    engine = Pipeline(
        make_config(scheduling_policy="priority", num_gpu_blocks_override=6, preemption_mode="swap"),
        num_host_blocks=num_host_blocks,
    )
    _, request = proposing(RIGHT[1:5], engine, priority=1, max_tokens=8)
    engine.launch()
    engine.add("b", range(20, 34), max_tokens=2, priority=0)
    plan = engine.launch()
    assert plan.removed_request_ids == ["a"]
    engine.land_all()
    assert engine.tokens("a") == RIGHT[:6]
    engine.drain()
    assert engine.tokens("a") == run_alone(request, engine.config).new_token_ids


def test_results_of_another_version_are_refused():
    engine = Pipeline()
    engine.add("a", PROMPT)
    engine.launch()
    with pytest.raises(EngineError, match=f"version 3, not {STEP_PROTOCOL_VERSION}"):
        engine.land(version=3)


@about_an_assert
def test_more_tokens_than_were_planned_are_a_bug():
    engine = Pipeline()
    engine.add("a", PROMPT)
    engine.launch()
    output = engine.executor.collect()
    several = msgspec.structs.replace(output, sampled_token_ids={"a": [1, 2]})
    with pytest.raises(AssertionError, match="for 1 samples"):
        engine.finish_step(engine.in_flight.popleft(), several)


GUESSING = {"method": "draft_model", "model": "another", "num_speculative_tokens": 6}


def test_draft_model_has_slots_behind_the_drafts():
    """Blocks of 4 tokens: 7 are known, 2 are drafts, and 6 more may be guessed before the next plan."""
    engine, _ = proposing(RIGHT[1:3], Pipeline(make_config(speculative_config=GUESSING)))
    engine.launch()
    assert len(engine.scheduler._kv.get_block_ids(engine.requests["a"])[0]) == 4
    engine.drain()
    assert engine.tokens("a") == RIGHT


@pytest.mark.parametrize(("num_blocks", "num_held"), [(8, 3), (5, 3), (4, 3)])
def test_draft_model_slots_are_limited_by_tokens_and_free_blocks(num_blocks, num_held):
    config = make_config(speculative_config=GUESSING, num_gpu_blocks_override=num_blocks)
    engine, request = proposing([], Pipeline(config), max_tokens=5)
    engine.launch()
    assert len(engine.scheduler._kv.get_block_ids(request)[0]) == num_held
    engine.drain()
    assert engine.tokens("a") == RIGHT[:5]
