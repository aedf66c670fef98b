# SPDX-License-Identifier: Apache-2.0
"""Requests that share a prompt: computed once, held in the same blocks, each with its own last block."""

import msgspec
import pytest

from quire.errors import ValidationError
from quire.sampling_params import SamplingParams
from quire.scheduler.forks import make_fork
from quire.scheduler.request import Request, RequestStatus
from tests.fixtures.folded import folded
from tests.scheduler.harness import Engine, make_config, run_alone

PROMPT = range(30)


def engine_of(kinds=("full",), **changes) -> Engine:
    config = make_config(**{"max_num_seqs": 16, "max_num_batched_tokens": 64, **changes})
    return Engine(config, len(kinds), kinds)


def add_family(engine: Engine, n: int, prompt=PROMPT, **params) -> list[str]:
    """A parent and n - 1 children, as the front end adds them."""
    names = [f"r.{i}" for i in range(n)]
    for name in names:
        engine.add(name, prompt, fork_of=None if name == "r.0" else "r.0", **params)
    return names


def preempt_last(engine: Engine, name: str) -> None:
    """Take the blocks of a running request, which must be the one that ranks last."""
    engine.scheduler._queues.preempt_last(engine.requests[name], engine.now)
    assert engine.requests[name].status is RequestStatus.PREEMPTED


def scheduled(engine: Engine) -> list[dict[str, int]]:
    return [plan.num_scheduled_tokens for plan in engine.plans]


def check_outputs(engine: Engine, names: list[str]) -> None:
    for name in names:
        assert engine.tokens(name) == run_alone(engine.requests[name], engine.config).new_token_ids


@folded("caching", [True, False])
@folded("budget", [64, 16, 8])
def test_eight_completions_compute_their_prompt_once(caching, budget):
    engine = engine_of(enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=8)
    names = add_family(engine, 8, max_tokens=10)
    engine.drain()
    total = sum(plan.total_num_scheduled_tokens for plan in engine.plans)
    assert total == 30 + 7 * 1 + 8 * (10 - 1), "the prompt, its last token for each child, and their own"
    assert [engine.last(name).num_cached_tokens for name in names] == [0] + [29] * 7
    check_outputs(engine, names)


def test_children_share_full_blocks_and_copy_the_diverging_one():
    """30 tokens in blocks of 4: seven full ones, and one with tokens 28 and 29."""
    engine = engine_of(enable_prefix_caching=False)
    add_family(engine, 8)
    engine.step()
    assert engine.scheduler.stats().num_waiting == 7
    plan = engine.step()
    assert scheduled(engine)[-1] == dict.fromkeys([f"r.{i}" for i in range(8)], 1)
    tables = [data.block_ids[0] for data in plan.new_requests]
    assert len({tuple(table[:7]) for table in tables}) == 1
    assert plan.block_copies == [(8, table[7]) for table in tables]
    assert engine.scheduler.stats().kv_cache_usage == (7 + 8) / 64


def test_a_divergence_at_a_block_boundary_copies_nothing():
    """29 tokens: the last prompt token, which each child computes, begins a block."""
    engine = engine_of(enable_prefix_caching=False)
    add_family(engine, 3, range(29))
    engine.step()
    plan = engine.step()
    assert (len(plan.new_requests), plan.block_copies) == (2, [])
    engine.drain()
    check_outputs(engine, ["r.0", "r.1", "r.2"])


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8])
def test_prompts_of_all_shapes(length):
    engine = engine_of()
    names = add_family(engine, 3, range(length))
    engine.drain()
    check_outputs(engine, names)


def test_waiting_children_delay_no_others_and_then_go_first():
    engine = engine_of(max_num_batched_tokens=16, max_num_seqs=2)
    add_family(engine, 2)
    engine.add("other", [5], max_tokens=1)
    engine.add("later", [6], max_tokens=1)
    engine.step()
    assert scheduled(engine)[-1] == {"r.0": 16}
    engine.step()
    assert scheduled(engine)[-1] == {"r.0": 14, "other": 1}
    engine.step()
    assert scheduled(engine)[-1] == {"r.0": 1, "r.1": 1}
    engine.drain()


def test_late_child_forks_from_a_parent_that_has_continued():
    engine = engine_of(enable_prefix_caching=False)
    engine.add("p", PROMPT, max_tokens=20)
    for _ in range(6):
        engine.step()
    engine.add("c", PROMPT, max_tokens=20, fork_of="p")
    engine.step()
    assert scheduled(engine)[-1] == {"p": 1, "c": 1}
    engine.drain()
    check_outputs(engine, ["p", "c"])


@folded(
    ("kind", "length", "cached"),
    [
        ("window 6", 30, 29),
        ("chunk 8", 30, 29),
        ("chunk 8", 33, 32),
        ("state 1", 30, 0),
        ("state 1", 29, 28),
        ("state 2", 33, 32),
        ("state 2", 29, 0),
    ],
)
@folded("full_too", [True, False])
def test_group_forks_at_blocks_the_child_reads(kind, length, cached, full_too):
    """Blocks of a window are present when the parent has its first token; states only at the ends of their blocks."""
    engine = engine_of(("full", kind) if full_too else (kind,), enable_prefix_caching=False)
    names = add_family(engine, 3, range(length), max_tokens=20)
    engine.drain()
    assert [engine.last(name).num_cached_tokens for name in names] == [0, cached, cached]
    check_outputs(engine, names)


@pytest.mark.parametrize(("kinds", "cached"), [(("full",), 13), (("full", "window 5"), 0), (("chunk 4",), 0)])
def test_late_child_computes_the_prompt_if_a_group_freed_it(kinds, cached):
    engine = engine_of(kinds, enable_prefix_caching=False)
    engine.add("p", range(14), max_tokens=30)
    for _ in range(20):
        engine.step()
    engine.add("c", range(14), max_tokens=20, fork_of="p")
    engine.drain()
    assert engine.last("c").num_cached_tokens == cached
    check_outputs(engine, ["p", "c"])


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_child_of_an_ended_parent_starts_in_the_next_step(end):
    engine = engine_of(max_num_batched_tokens=16)
    names = add_family(engine, 2, prompt=range(16))
    plan = engine.schedule()
    assert plan.num_scheduled_tokens == {"r.0": 16}
    output = engine.executor.execute_model(plan)
    if end == "fail":
        output = msgspec.structs.replace(output, sampled_token_ids={}, failed={"r.0": "bad numbers"})
    else:
        engine.abort("r.0")
    engine.finish_step(plan, output)
    assert engine.step().num_scheduled_tokens == {"r.1": 16}
    engine.drain()
    check_outputs(engine, names[1:])


def test_child_of_a_parent_ended_at_first_token_has_its_prompt():
    engine = engine_of(max_num_batched_tokens=16)
    names = add_family(engine, 2, prompt=range(16), max_tokens=1)
    engine.drain()
    assert scheduled(engine)[:2] == [{"r.0": 16}, {"r.1": 4}], (
        "three blocks are cached, and the last is computed"
    )
    check_outputs(engine, names)


@pytest.mark.parametrize(("caching", "num_steps"), [(True, 1), (False, 2)])
def test_child_waits_for_a_parent_preempted_before_first_token(caching, num_steps):
    """The parent comes back first, so the prompt is computed for all of them once more, and not by each."""
    engine = engine_of(enable_prefix_caching=caching, max_num_batched_tokens=16)
    names = add_family(engine, 3)
    engine.step()
    preempt_last(engine, "r.0")
    for _ in range(num_steps):
        assert [engine.scheduler.explain(name, engine.now).cause for name in names[1:]] == [
            "shared_prompt"
        ] * 2
        plan = engine.step()
        assert [*plan.num_scheduled_tokens] == ["r.0"]
    assert engine.step().num_scheduled_tokens == dict.fromkeys(names, 1)
    engine.drain()
    check_outputs(engine, names)


def test_a_child_can_end_while_it_waits():
    engine = engine_of(max_num_batched_tokens=16)
    add_family(engine, 3)
    engine.step()
    engine.abort("r.1")
    engine.drain()
    assert engine.last("r.1").finish_reason == "abort"
    check_outputs(engine, ["r.0", "r.2"])


def test_resumed_parent_is_forked_only_after_its_prompt():
    """The parent is computed again in the very step in which the child could start."""
    engine = engine_of(enable_prefix_caching=False, max_num_seqs=2, num_gpu_blocks_override=40)
    add_family(engine, 2)
    engine.step()
    preempt_last(engine, "r.0")
    plan = engine.step()
    assert [data.num_computed_tokens for data in plan.new_requests] == [0, 0]
    engine.drain()
    check_outputs(engine, ["r.0", "r.1"])


def test_fork_of_a_child_that_resumes_as_a_fork_in_the_same_step():
    engine = engine_of(enable_prefix_caching=False)
    engine.add("p", PROMPT, max_tokens=20)
    engine.step()
    engine.add("c", PROMPT, max_tokens=20, fork_of="p")
    engine.step()
    preempt_last(engine, "c")
    engine.add("g", PROMPT, max_tokens=20, fork_of="c")
    plan = engine.step()
    assert [data.num_computed_tokens for data in plan.new_requests] == [29, 29]
    assert len({source for source, _ in plan.block_copies}) == 1
    engine.drain()
    check_outputs(engine, ["p", "c", "g"])


@pytest.mark.parametrize(("prompt", "salt"), [([1, 2, 4], None), ([1, 2, 3], "other")])
def test_a_fork_of_another_prompt_or_tenant_is_refused(prompt, salt):
    engine = engine_of()
    engine.add("p", [1, 2, 3])
    with pytest.raises(ValidationError, match="is no fork of 'p': their prompts differ"):
        engine.add("c", prompt, cache_salt=salt, fork_of="p")
    engine.drain()


def test_a_prompt_that_is_the_same_list_is_not_compared():
    class Long(list):
        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = None

    prompt = Long([1, 2, 3])
    parent, child = (
        Request(request_id=name, prompt_token_ids=prompt, sampling_params=SamplingParams()) for name in "pc"
    )
    assert make_fork(child, parent)


def test_an_unknown_parent_is_no_parent():
    engine = engine_of()
    engine.add("c", [1, 2, 3], fork_of="gone")
    engine.drain()
    check_outputs(engine, ["c"])


def test_a_new_request_under_the_parents_id_is_not_forked():
    engine = engine_of(max_num_seqs=1, enable_prefix_caching=False)
    names = add_family(engine, 2, max_tokens=4)
    engine.step()
    engine.abort("r.0")
    engine.add("r.0", range(5, 12), max_tokens=30)
    engine.drain()
    check_outputs(engine, names)


def test_prompt_logprobs_are_computed_and_not_shared():
    engine = engine_of(enable_prefix_caching=False)
    engine.add("p", PROMPT)
    engine.step()
    engine.add("c", PROMPT, fork_of="p", prompt_logprobs=1)
    engine.drain()
    assert sum(len(update.prompt_logprobs or []) for update in engine.updates["c"]) == 29


def test_waiting_for_a_prompt_is_explained():
    engine = engine_of(max_num_batched_tokens=16)
    add_family(engine, 2)
    engine.step()
    waiting = engine.scheduler.explain("r.1", engine.now)
    assert (waiting.cause, waiting.num_ahead) == ("shared_prompt", 0)
    engine.drain()
    ended = engine.scheduler.explain("r.1", engine.now)
    assert sum(share.duration_ns for share in ended.shares) == ended.waited_ns > 0


def test_forks_are_no_hits_of_the_prefix_cache():
    engine = engine_of()
    for _ in range(2):
        engine.drain()
        add_family(engine, 8)
    engine.drain()
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (30 + 30, 28), (
        "the parents', and no child's"
    )
