# SPDX-License-Identifier: Apache-2.0
"""Requests that keep their blocks when the weights change: nothing is computed twice, and none finds their blocks."""

from __future__ import annotations

import itertools

from quire.scheduler.request import RequestStatus
from tests.fixtures.folded import folded
from tests.scheduler.harness import Engine, make_config, run_alone


def mix(engine: Engine) -> None:
    """Pause, let the worker free all rows, and go on with other weights."""
    engine.scheduler.pause(engine.now)
    engine.scheduler.mix(engine.now)
    while engine.scheduler.has_work():
        plan = engine.scheduler.schedule(engine.now)
        assert not plan.scheduled
        engine.finish_step(plan, engine.executor.execute_model(plan))
    engine.executor.prepare_weights("new")
    engine.executor.commit_weights(keeps_cache=True)
    engine.scheduler.check_integrity()
    engine.scheduler.resume(engine.now)


def num_computed(engine: Engine) -> int:
    return sum(plan.total_num_scheduled_tokens for plan in engine.plans)


@folded("caching", [True, False])
@folded("kinds", [("full",), ("window 6",), ("full", "window 5"), ("full", "state 2")])
@folded("num_steps", [1, 2, 5])
def test_kept_requests_go_on_where_they_were(caching, kinds, num_steps):
    """At any point of the prompt and of the output; a prompt may be half computed."""
    engine = Engine(make_config(enable_prefix_caching=caching, max_num_batched_tokens=8), len(kinds), kinds)
    lengths = {"a": 5, "b": 11}
    requests = [
        engine.add(name, range(length), prompt_logprobs=1, max_tokens=9) for name, length in lengths.items()
    ]
    for _ in range(num_steps):
        engine.step()
    mix(engine)
    engine.drain()
    assert num_computed(engine) == sum(length + 9 - 1 for length in lengths.values())
    assert engine.scheduler.stats().num_preemptions == 0
    for request in requests:
        name = request.request_id
        assert engine.tokens(name) == run_alone(request, engine.config).new_token_ids
        reported = [one for update in engine.updates[name] for one in update.prompt_logprobs or []]
        assert len(reported) == lengths[name] - 1


def test_other_requests_find_new_blocks_only():
    """A prefix found after the change was computed after it, by a request that began after it."""
    engine = Engine()
    prompt = range(12)
    engine.add("ended", prompt, max_tokens=1)
    engine.drain()
    engine.add("kept", prompt, max_tokens=20)
    engine.step()
    mix(engine)
    engine.add("new", prompt, max_tokens=1)
    engine.step()
    engine.drain()
    engine.add("newer", prompt, max_tokens=1)
    engine.add("longer", [*prompt, *engine.tokens("kept")], max_tokens=1)
    engine.drain()
    found = {name: engine.last(name).num_cached_tokens for name in ("kept", "new", "newer", "longer")}
    assert found == {"kept": 8, "new": 0, "newer": 8, "longer": 12}


def test_blocks_of_old_weights_on_the_host_are_not_found():
    engine = Engine(make_config(num_gpu_blocks_override=9), num_host_blocks=20)
    engine.add("first", range(20), max_tokens=1)
    engine.drain()
    engine.add("other", [30] * 20, max_tokens=1)
    engine.drain()
    mix(engine)
    engine.add("again", range(20), max_tokens=1)
    engine.drain()
    assert engine.last("again").num_cached_tokens == 0


@folded("swaps", [True, False])
def test_preempted_mixed_request_is_cached_only_if_computed_anew(swaps):
    """One that was swapped out keeps its blocks and stays unknown; one that is computed again has new ones only."""
    mode = "swap" if swaps else "recompute"
    engine = Engine(make_config(num_gpu_blocks_override=9, preemption_mode=mode), num_host_blocks=40)
    requests = [engine.add(name, range(ord(name), ord(name) + 8), max_tokens=16) for name in "ab"]
    engine.step()
    mix(engine)
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_swaps == (stats.num_preemptions if swaps else 0)
    for request in requests:
        assert engine.tokens(request.request_id) == run_alone(request, engine.config).new_token_ids
        engine.add(f"again {request.request_id}", request.prompt_token_ids, max_tokens=1)
        engine.drain()
    assert engine.last("again a").num_cached_tokens == 0
    assert (engine.last("again b").num_cached_tokens > 0) == (not swaps)


def test_request_swapped_out_before_the_change_keeps_its_blocks():
    engine = Engine(make_config(num_gpu_blocks_override=9, preemption_mode="swap"), num_host_blocks=40)
    requests = [engine.add(name, range(ord(name), ord(name) + 8), max_tokens=16) for name in "ab"]
    while not engine.scheduler.stats().num_swaps:
        engine.step()
    assert {request.status for request in requests} == {RequestStatus.RUNNING, RequestStatus.PREEMPTED}
    mix(engine)
    engine.drain()
    assert num_computed(engine) == 2 * (8 + 16 - 1)
    engine.add("again", requests[1].prompt_token_ids, max_tokens=1)
    engine.drain()
    assert engine.last("again").num_cached_tokens == 0


def test_fork_of_a_mixed_prompt_is_mixed_itself():
    engine = Engine(make_config(max_num_batched_tokens=8))
    prompt = list(range(12))
    engine.add("parent", prompt, max_tokens=4)
    engine.add("child", prompt, max_tokens=4, fork_of="parent", seed=5)
    engine.step()
    mix(engine)
    engine.drain()
    assert num_computed(engine) < 2 * (12 + 4 - 1), "the child shares its parent's prompt"
    engine.add("again", prompt, max_tokens=1)
    engine.drain()
    assert engine.last("again").num_cached_tokens == 0


def test_request_with_sampler_state_is_computed_again():
    engine = Engine()
    stateful = engine.add("a", range(6), max_tokens=8, mirostat=2)
    plain = engine.add("b", range(6), max_tokens=8)
    for _ in range(3):
        engine.step()
    mix(engine)
    assert (stateful.status, plain.status) == (RequestStatus.PREEMPTED, RequestStatus.RUNNING)
    engine.drain()
    assert [len(engine.tokens(name)) for name in "ab"] == [8, 8]


def test_kept_request_that_is_aborted_leaves_no_row_twice():
    """The worker has freed its row, and hears of it no more; another one of the same name may come."""
    engine = Engine()
    engine.add("a", range(6), max_tokens=8)
    engine.step()
    engine.scheduler.pause(engine.now)
    engine.scheduler.mix(engine.now)
    engine.abort("a")
    removed = list(itertools.chain(*(engine.step().removed_request_ids for _ in range(2))))
    assert removed == ["a"]
    engine.scheduler.resume(engine.now)
    engine.add("a", range(6), max_tokens=8)
    engine.drain()
    assert len(engine.tokens("a")) == 8


def test_mixed_runs_are_drafted_and_overlap_as_others():
    engine = Engine(max_drafts=3)
    request = engine.add("a", range(6), max_tokens=20)
    for _ in range(3):
        engine.step()
    mix(engine)
    engine.drain()
    assert engine.tokens("a") == run_alone(request, engine.config).new_token_ids
