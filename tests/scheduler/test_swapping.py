# SPDX-License-Identifier: Apache-2.0
"""The host tier as a whole engine sees it; the null executor checks every block that moves."""

import pytest

from quire.scheduler.output import SchedulerOutput
from quire.scheduler.request import RequestStatus
from tests.fixtures.folded import folded
from tests.scheduler.harness import Engine, make_config, run_alone


def small(num_host_blocks: int = 20, num_groups: int = 1, **changes) -> Engine:
    """Room for one and a half of the requests that `crowd` adds."""
    fields = {"num_gpu_blocks_override": 1 + 8 * num_groups, "preemption_mode": "swap", **changes}
    return Engine(make_config(**fields), num_groups, num_host_blocks=num_host_blocks)


def crowd(engine: Engine, **params):
    return [
        engine.add(name, range(ord(name), ord(name) + 8), max_tokens=16, **params) for name in ("a", "b", "c")
    ]


def num_computed(engine: Engine) -> int:
    return sum(plan.total_num_scheduled_tokens for plan in engine.plans)


def run_until_swapped(engine: Engine) -> SchedulerOutput:
    while not engine.scheduler.stats().num_swaps:
        plan = engine.step()
    return plan


@folded("caching", [True, False])
@folded("num_groups", [1, 2])
@folded("prompt_logprobs", [None, 1])
def test_a_swapped_request_returns_with_nothing_computed_twice(caching, num_groups, prompt_logprobs):
    engine = small(40, num_groups, enable_prefix_caching=caching)
    requests = crowd(engine, prompt_logprobs=prompt_logprobs)
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions == stats.num_swaps > 0
    assert num_computed(engine) == 3 * (8 + 16 - 1), "every token but the last of each request, once"
    for request in requests:
        assert engine.tokens(request.request_id) == run_alone(request, engine.config).new_token_ids
    reported = [entry for update in engine.updates["c"] for entry in update.prompt_logprobs or []]
    assert len(reported) == (7 if prompt_logprobs else 0)


@folded("kinds", [("window 6",), ("full", "window 5"), ("full", "chunk 8"), ("full", "state 2")])
@folded("caching", [True, False])
def test_blocks_that_a_group_needs_no_more_are_not_swapped(kinds, caching):
    """Every group goes on after the swap with what it read before, whatever else it had."""
    fields = {"num_gpu_blocks_override": 4 + 4 * len(kinds), "preemption_mode": "swap"}
    config = make_config(enable_prefix_caching=caching, max_num_batched_tokens=8, **fields)
    engine = Engine(config, len(kinds), kinds, num_host_blocks=60)
    requests = [engine.add(name, range(ord(name), ord(name) + 3), max_tokens=18) for name in "abcd"]
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions == stats.num_swaps > 0
    assert num_computed(engine) == 4 * (3 + 18 - 1)
    for request in requests:
        assert engine.tokens(request.request_id) == run_alone(request, engine.config).new_token_ids


def test_recomputing_can_be_forced():
    engine = small(preemption_mode="recompute", enable_prefix_caching=False)
    crowd(engine)
    engine.drain()
    stats = engine.scheduler.stats()
    assert (stats.num_preemptions > 0, stats.num_swaps) == (True, 0)
    assert num_computed(engine) > 3 * 23
    assert not any(plan.swap_outs or plan.swap_ins for plan in engine.plans)


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_room_on_the_host_a_request_is_recomputed(num_host_blocks):
    engine = small(num_host_blocks, enable_prefix_caching=False)
    requests = crowd(engine)
    engine.drain()
    stats = engine.scheduler.stats()
    assert (stats.num_preemptions > 0, stats.num_swaps) == (True, 0)
    for request in requests:
        assert engine.tokens(request.request_id) == run_alone(request, engine.config).new_token_ids


def test_only_blocks_evicted_from_the_device_are_copied_back():
    """The victim's first block is shared with the request that stays, others may not have been evicted."""
    engine = small(num_gpu_blocks_override=8)
    engine.add("a", range(6), max_tokens=14)
    engine.step()
    engine.add("b", [*range(4), 9, 9], max_tokens=14)
    swapped = run_until_swapped(engine)
    engine.drain()
    (back,) = [plan for plan in engine.plans if plan.swap_ins]
    (data,) = back.new_requests
    assert data.request_id == "b"
    assert len(swapped.swap_outs) == len(data.block_ids[0])
    assert 0 < len(back.swap_ins) < len(data.block_ids[0])


def test_the_end_of_a_swapped_request_frees_its_host_blocks():
    engine = small(enable_prefix_caching=False)
    requests = crowd(engine)
    run_until_swapped(engine)
    assert engine.scheduler.stats().host_cache_usage > 0.0
    swapped = [r.request_id for r in requests if r.status is RequestStatus.PREEMPTED]
    engine.abort(*swapped)
    assert engine.scheduler.stats().host_cache_usage == 0.0
    engine.drain()


def test_reset_waits_for_swapped_requests():
    engine = small()
    requests = crowd(engine)
    run_until_swapped(engine)
    engine.abort(*[r.request_id for r in requests if r.status is not RequestStatus.PREEMPTED])
    assert not engine.scheduler.reset_prefix_cache()
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()


def fill_and_return(engine: Engine) -> int:
    """Run one prompt, then others that evict it, then the first again; returns what it found of itself."""
    engine.add("first", range(20), max_tokens=1)
    engine.drain()
    for i in range(3):
        engine.add(f"other{i}", [30 + i] * 20, max_tokens=1)
        engine.drain()
    engine.add("again", range(20), max_tokens=1)
    engine.drain()
    return engine.last("again").num_cached_tokens


@folded(("num_host_blocks", "found"), [(0, 0), (3, 0), (40, 16)])
@folded("num_groups", [1, 2])
def test_an_evicted_prefix_comes_back_from_the_host(num_host_blocks, found, num_groups):
    engine = small(num_host_blocks * num_groups, num_groups)
    assert fill_and_return(engine) == found
    assert any(plan.swap_ins for plan in engine.plans) == bool(found)


def test_a_hit_goes_on_from_the_device_to_the_host():
    """Chains are evicted from their tails, so the head is on the device and the tail on the host."""
    engine = small(20, num_gpu_blocks_override=8)
    engine.add("first", range(20), max_tokens=1)
    engine.drain()
    engine.add("other", [30] * 17, max_tokens=1)
    engine.drain()
    engine.add("again", range(20), max_tokens=1)
    plan = engine.step()
    assert engine.last("again").num_cached_tokens == 16
    assert 0 < len(plan.swap_ins) < 4


def test_a_forgotten_prefix_does_not_come_back_from_the_host():
    engine = small(40)
    engine.add("first", range(20), max_tokens=1)
    engine.drain()
    engine.add("other", [30] * 30, max_tokens=1)
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("again", range(20), max_tokens=1)
    engine.drain()
    assert engine.last("again").num_cached_tokens == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_resumed_request_counts_no_prefix_cache_hit(mode):
    """A request is looked up once, whatever it finds when it returns; what is on the host is found as well."""
    engine = small(40, preemption_mode=mode)
    crowd(engine)
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert bool(stats.num_swaps) == (mode == "swap")
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (3 * 8, 0)
    engine.add("again", range(ord("c"), ord("c") + 8))
    engine.drain()
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (4 * 8, 4)
