# SPDX-License-Identifier: Apache-2.0
"""Requests that want numbers of their prompt instead of tokens, one case at a time.

That no mixture of them changes an output is the business of the state machines here and in tests/engine.
"""

import dataclasses

import msgspec
import pytest

from quire.config import EngineConfig
from quire.config.pooling import PoolingSpec
from quire.errors import ValidationError
from quire.executor.null import NUM_POOLED
from quire.pooling_params import PoolingParams
from quire.scheduler.fair import Fair
from quire.scheduler.output import Pooled
from tests.fixtures.asserts import about_an_assert
from tests.scheduler.harness import Engine, make_config, run_alone
from tests.scheduler.test_in_flight import Pipeline

POOLED = {"pooling_params": PoolingParams()}


def pooled_alone(prompt) -> Pooled | None:
    engine = Engine()
    return run_alone(engine.add("alone", prompt, **POOLED), engine.config).pooled


def chunks(plan):
    return [(one.start, one.num_tokens, one.num_samples, one.pools) for one in plan.scheduled]


def test_a_request_to_pool_ends_with_its_prompt():
    engine = Engine()
    engine.add("a", range(10), **POOLED)
    plan = engine.step()
    assert plan.new_requests[0].pooling_params == PoolingParams()
    assert chunks(plan) == [(0, 10, 0, True)]
    (update,) = engine.updates["a"]
    assert (update.finish_reason, update.stop_reason, update.new_token_ids) == ("stop", None, [])
    assert update.pooled.shape == [NUM_POOLED]
    assert update.scheduled_ts > 0.0
    engine.drain()


def test_worker_receives_the_start_of_a_second_text():
    engine = Engine()
    engine.add("a", range(10), second_text_start=4, **POOLED)
    engine.add("b", range(10), **POOLED)
    assert [new.second_text_start for new in engine.step().new_requests] == [4, None]
    engine.drain()


def test_pooled_output_depends_on_the_whole_prompt():
    prompts = [range(10), range(9), [99, *range(1, 10)]]
    assert len({pooled_alone(prompt).data for prompt in prompts}) == 3


def test_only_the_last_chunk_pools():
    engine = Engine(make_config(max_num_batched_tokens=4))
    engine.add("a", range(10), **POOLED)
    plans = [engine.step() for _ in range(3)]
    assert [chunks(plan)[0] for plan in plans] == [(0, 4, 0, False), (4, 4, 0, False), (8, 2, 0, True)]
    assert engine.last("a").pooled == pooled_alone(range(10))
    engine.drain()


def test_nothing_is_planned_behind_the_end_of_the_prompt():
    engine = Pipeline()
    request = engine.add("a", range(10), **POOLED)
    engine.launch()
    assert request.num_placeholder_tokens == 0
    assert engine.launch().is_empty
    assert engine.scheduler.has_work()
    engine.land()
    assert engine.launch().removed_request_ids == ["a"]
    engine.drain()


@pytest.mark.parametrize("generates_first", [True, False])
def test_pooled_prompts_share_prefixes_but_not_the_last_token(generates_first):
    """Blocks of 4 tokens: two whole ones, and the second is not reused by who has nothing behind it."""
    engine = Engine()
    kinds = [{"max_tokens": 1}, POOLED]
    first, second = kinds if generates_first else reversed(kinds)
    engine.add("a", range(8), **first)
    engine.drain()
    engine.add("b", range(8), **second)
    engine.add("c", range(9), **second)
    assert [data.num_computed_tokens for data in engine.step().new_requests] == [4, 8]
    engine.drain()
    if generates_first:
        assert engine.last("b").pooled == pooled_alone(range(8))


def test_a_prompt_to_pool_may_fill_the_context_and_the_cache():
    """64 tokens of context, in 16 blocks of 4 tokens."""
    engine = Engine(make_config(num_gpu_blocks_override=17))
    with pytest.raises(ValidationError, match=r"has 64 tokens; .* leave room for one more in .* of 64"):
        engine.add("generates", range(64))
    with pytest.raises(ValidationError, match=r"has 65 tokens; it must have at least 1 and fit the .* of 64"):
        engine.add("long", range(65), **POOLED)
    with pytest.raises(ValidationError, match="has 0 tokens"):
        engine.add("empty", [], **POOLED)
    engine.add("a", range(64), **POOLED)
    engine.drain()
    assert engine.last("a").pooled is not None


def test_a_prompt_to_pool_must_fit_the_cache():
    engine = Engine(make_config(num_gpu_blocks_override=16))
    with pytest.raises(ValidationError, match=r"61 tokens .* 16 blocks of 4 .* has 15") as caught:
        engine.add("a", range(61), **POOLED)
    assert caught.value.param == "prompt"
    engine.add("a", range(60), **POOLED)
    engine.drain()


@pytest.mark.parametrize("num_host_blocks", [0, 20])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_preempted_request_is_pooled_all_the_same(num_host_blocks, num_steps):
    """With its last chunk in flight it ends where it waits; before, it comes back for the rest."""
    engine = Pipeline(
        make_config(
            scheduling_policy="priority",
            preemption_mode="swap",
            num_gpu_blocks_override=6,
            max_num_batched_tokens=10,
        ),
        num_host_blocks=num_host_blocks,
    )
    engine.add("a", range(18), priority=1, **POOLED)
    for _ in range(num_steps):
        engine.launch()
    engine.add("b", range(20, 34), priority=0, **POOLED)
    assert engine.launch().removed_request_ids == ["a"]
    engine.land_all()
    assert bool(engine.updates["a"]) == (num_steps == 2)
    engine.drain()
    assert engine.last("a").pooled == pooled_alone(range(18))
    assert engine.last("b").pooled == pooled_alone(range(20, 34))


def test_a_fork_shares_the_prompt_of_a_request_to_pool():
    engine = Engine()
    engine.add("a", range(9), **POOLED)
    engine.add("b", range(9), fork_of="a", max_tokens=1)
    engine.add("c", range(9), fork_of="a", **POOLED)
    engine.step()
    assert engine.last("a").pooled == pooled_alone(range(9))
    assert engine.step().num_scheduled_tokens == {"b": 1, "c": 1}
    engine.drain()


def test_a_request_that_is_aborted_or_fails_has_nothing_pooled():
    engine = Engine()
    for name in "abc":
        engine.add(name, range(4), **POOLED)
    engine.abort("a")
    engine.fail("b")
    assert [engine.last(name).finish_reason for name in "abc"] == ["abort", "error", "stop"]
    assert [engine.last(name).pooled for name in "abc"] == [None, None, pooled_alone(range(4))]
    engine.drain()


def test_a_tenant_is_charged_for_the_prompt_that_is_pooled():
    config: EngineConfig = make_config(scheduling_policy="fair", fair_input_token_weight=1.0)
    engine = Engine(config)
    policy = engine.scheduler._queues.policy
    assert isinstance(policy, Fair)
    engine.add("a", range(10), tenant="ann", **POOLED)
    engine.drain()
    assert policy.counter("ann") == 10.0


@about_an_assert
def test_result_without_pooled_output_is_a_bug():
    engine = Engine()
    engine.add("a", range(10), **POOLED)
    plan = engine.schedule()
    output = msgspec.structs.replace(engine.executor.execute_model(plan), pooled={})
    with pytest.raises(AssertionError, match="planned to pool"):
        engine.finish_step(plan, output)


@pytest.mark.parametrize("fields", [{"num_samples": 1}, {"pools": False}])
def test_plan_that_pools_off_the_end_of_a_prompt_is_refused(fields):
    engine = Engine()
    engine.add("a", range(10), **POOLED)
    plan = engine.schedule()
    scheduled = [msgspec.structs.replace(plan.scheduled[0], **fields)]
    with pytest.raises(AssertionError, match=r"is to have 0 samples|pools at its end"):
        engine.executor.execute_model(msgspec.structs.replace(plan, scheduled=scheduled))


@pytest.mark.parametrize(("pooling", "expected"), [("mean", [0, 0]), ("last", [16])])
def test_pooling_of_all_tokens_uses_no_prefix_and_no_swap(pooling, expected):
    """A generating request grows until it takes the pooled request's blocks, in the middle of that prompt."""
    config = make_config(
        num_gpu_blocks_override=9,
        max_num_batched_tokens=5,
        long_prefill_token_threshold=1,
        preemption_mode="swap",
        max_model_len=32,
    )
    spec = PoolingSpec(("embed",), pooling, NUM_POOLED)
    engine = Engine(dataclasses.replace(config, pooling=spec), num_host_blocks=20)
    engine.add("first", range(20), max_tokens=1)
    engine.drain()
    engine.add("grows", range(30, 34), max_tokens=28)
    pooled = engine.add("pooled", range(20), **POOLED)
    engine.drain()
    starts = [
        new.num_computed_tokens
        for plan in engine.plans
        for new in plan.new_requests
        if new.request_id == "pooled"
    ]
    assert starts == expected
    assert pooled.num_preemptions == len(expected) - 1
    assert engine.scheduler.stats().num_swaps == 0
    assert engine.last("pooled").pooled == pooled_alone(range(20))
