# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from quire.errors import ValidationError
from quire.kv_cache.manager import IntegrityError
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.request import RequestStatus
from tests.fixtures.asserts import about_an_assert
from tests.fixtures.folded import folded
from tests.scheduler.harness import Engine, make_config, run_alone


def scheduled(plan: SchedulerOutput) -> dict[str, int]:
    return plan.num_scheduled_tokens


def new_ids(plan: SchedulerOutput) -> list[str]:
    return [data.request_id for data in plan.new_requests]


# Order and budget


def test_requests_start_in_order_of_arrival_and_share_the_budget():
    engine = Engine()
    for name, length in [("a", 6), ("b", 6), ("c", 6)]:
        engine.add(name, range(length))
    assert scheduled(engine.step()) == {"a": 6, "b": 6, "c": 4}
    assert scheduled(engine.step()) == {"a": 1, "b": 1, "c": 2}


def test_running_requests_come_before_waiting_ones():
    engine = Engine()
    engine.add("a", range(4))
    engine.step()
    engine.add("b", range(50))
    assert scheduled(engine.step()) == {"a": 1, "b": 15}


def test_no_more_than_max_num_seqs_run():
    engine = Engine()
    for i in range(6):
        engine.add(str(i), [1, 2])
    engine.step()
    assert (engine.scheduler.stats().num_running, engine.scheduler.stats().num_waiting) == (4, 2)
    engine.drain()
    assert [len(engine.tokens(str(i))) for i in range(6)] == [8] * 6


def test_an_empty_plan_is_valid():
    engine = Engine()
    plan = engine.step()
    assert (plan.total_num_scheduled_tokens, plan.new_requests, plan.removed_request_ids) == (0, [], [])
    assert not engine.scheduler.has_work()


def test_equal_events_give_equal_plans():
    def plans() -> list[bytes]:
        engine = Engine(make_config(num_gpu_blocks_override=17))
        for i in range(6):
            engine.add(str(i), range(i, i + 9), max_tokens=30)
            engine.step()
        engine.drain()
        return [msgspec.msgpack.encode(plan) for plan in engine.plans]

    assert plans() == plans()


# Chunks


@pytest.mark.parametrize("budget", [1, 3, 7, 16, 64])
def test_chunk_sizes_do_not_change_the_output(budget):
    engine = Engine(make_config(max_num_batched_tokens=budget))
    request = engine.add("a", range(23))
    engine.drain()
    assert [plan.num_scheduled_tokens.get("a") for plan in engine.plans[: 23 // budget]] == [budget] * (
        23 // budget
    )
    assert engine.tokens("a") == run_alone(request, engine.config).new_token_ids


def test_unchunked_prompt_waits_for_a_step_with_room():
    engine = Engine(make_config(enable_chunked_prefill=False))
    for name, length in [("a", 10), ("b", 10), ("c", 2)]:
        engine.add(name, range(ord(name), ord(name) + length), max_tokens=2)
    assert scheduled(engine.step()) == {"a": 10}
    assert scheduled(engine.step()) == {"a": 1, "b": 10, "c": 2}


def test_unchunked_request_beyond_the_budget_still_resumes():
    config = make_config(
        enable_chunked_prefill=False, num_gpu_blocks_override=12, enable_prefix_caching=False
    )
    engine = Engine(config)
    requests = [engine.add(name, range(4), max_tokens=36) for name in "ab"]
    engine.drain()
    assert engine.last("b").num_preemptions > 0
    for request in requests:
        assert engine.tokens(request.request_id) == run_alone(request, config).new_token_ids


# Prefix cache


def test_later_request_reuses_the_prefix_and_reports_it():
    engine = Engine()
    engine.add("a", range(15))
    engine.drain()
    engine.add("b", [*range(12), 99], max_tokens=1)
    plan = engine.step()
    assert (plan.new_requests[0].num_computed_tokens, scheduled(plan)) == (12, {"b": 1})
    assert engine.last("b").num_cached_tokens == 12
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (28, 12)


def test_generated_tokens_are_reusable_too():
    engine = Engine()
    request = engine.add("a", range(6), max_tokens=8)
    engine.drain()
    engine.add("b", [*request.token_ids, 1, 2, 3])
    engine.step()
    assert engine.last("b").num_cached_tokens == 12


def test_request_hits_blocks_computed_by_a_running_one():
    engine = Engine()
    engine.add("a", range(10))
    engine.add("b", [*range(9), 30])
    engine.step()
    engine.add("c", [*range(9), 31])
    engine.step()
    assert engine.requests["b"].num_cached_tokens == 0
    assert engine.requests["c"].num_cached_tokens == 8


def test_salts_separate():
    engine = Engine()
    for name, salt in [("a", "x"), ("b", "y"), ("c", None), ("d", "x")]:
        engine.add(name, range(9), cache_salt=salt)
        engine.drain()
    assert [engine.last(name).num_cached_tokens for name in "abcd"] == [0, 0, 0, 8]


def test_prefix_caching_can_be_off():
    engine = Engine(make_config(enable_prefix_caching=False))
    for name in "ab":
        engine.add(name, range(9))
        engine.drain()
    assert engine.last("b").num_cached_tokens == 0


def test_reset_prefix_cache_forgets_when_idle_only():
    engine = Engine()
    engine.add("a", range(9))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("b", range(9))
    engine.drain()
    assert engine.last("b").num_cached_tokens == 0


def test_prompt_logprobs_skip_the_cache_once_per_position():
    engine = Engine(make_config(num_gpu_blocks_override=12))
    engine.add("warm", range(30), max_tokens=1)
    engine.drain()
    engine.add("a", [*range(30, 50)], max_tokens=20)
    engine.step()
    engine.add("b", range(20), max_tokens=20, prompt_logprobs=2)
    engine.drain()
    entries = [entry for update in engine.updates["b"] for entry in update.prompt_logprobs or []]
    assert [entry.token_ids[0] for entry in entries] == list(range(1, 20))
    assert (engine.last("b").num_cached_tokens, engine.last("b").num_preemptions > 0) == (0, True)


# Preemption


def test_the_last_request_is_preempted_and_returns_in_full():
    engine = Engine(make_config(num_gpu_blocks_override=7, enable_prefix_caching=False))
    requests = [engine.add(name, range(8), max_tokens=12) for name in "ab"]
    while not engine.scheduler.stats().num_preemptions:
        plan = engine.step()
    assert plan.removed_request_ids == ["b"]
    assert list(scheduled(plan)) == ["a"]
    assert requests[1].status is RequestStatus.PREEMPTED
    known = list(requests[1].token_ids)
    while "b" not in new_ids(plan):
        plan = engine.step()
    data = plan.new_requests[0]
    assert (data.token_ids, data.num_prompt_tokens, data.num_computed_tokens) == (known, 8, 0)
    engine.drain()
    assert [engine.last(name).num_preemptions for name in "ab"] == [0, 1]
    for request in requests:
        assert engine.tokens(request.request_id) == run_alone(request, engine.config).new_token_ids


def test_nothing_starts_in_a_step_that_preempts():
    engine = Engine(make_config(num_gpu_blocks_override=9, enable_prefix_caching=False))
    for name, length in [("a", 8), ("b", 8), ("c", 1)]:
        engine.add(name, range(length), max_tokens=16)
    engine.drain()
    preempting = [plan for plan in engine.plans if engine.preempted(plan)]
    assert preempting
    assert all(plan.new_requests == [] for plan in preempting)


def test_a_request_starts_only_when_all_its_known_tokens_fit():
    engine = Engine(make_config(num_gpu_blocks_override=13))
    engine.add("a", range(16), max_tokens=16)
    engine.step()
    engine.add("b", range(100, 133), max_tokens=4)
    assert new_ids(engine.step()) == [], "9 blocks are needed, 7 are free"
    engine.drain()
    assert engine.scheduler.stats().num_preemptions == 0


def test_a_preempted_request_goes_before_those_that_never_ran():
    engine = Engine(make_config(num_gpu_blocks_override=7, max_num_seqs=2))
    for name in "abc":
        engine.add(name, range(ord(name), ord(name) + 8), max_tokens=12)
    engine.drain()
    starts = [name for plan in engine.plans for name in new_ids(plan)]
    assert starts[:4] == ["a", "b", "b", "c"]


def test_resumed_request_reuses_blocks_and_reports_its_first_hit():
    engine = Engine(make_config(num_gpu_blocks_override=9))
    for name in "ab":
        engine.add(name, range(ord(name), ord(name) + 8), max_tokens=20)
    engine.drain()
    resumed = [data for plan in engine.plans for data in plan.new_requests if data.request_id == "b"][1]
    assert resumed.num_computed_tokens > 0
    assert engine.last("b").num_cached_tokens == 0


def test_a_pool_for_exactly_one_request_serves_many_to_the_end():
    """64 tokens take 16 blocks, less the last token, which is never computed: still 16."""
    engine = Engine(make_config(num_gpu_blocks_override=17))
    requests = [engine.add(str(i), range(i, i + 5), max_tokens=None) for i in range(4)]
    engine.drain(max_steps=4 * 64 * 2)
    assert engine.scheduler.stats().num_preemptions > 0
    for request in requests:
        assert engine.last(request.request_id).finish_reason == "length"
        assert engine.tokens(request.request_id) == run_alone(request, engine.config).new_token_ids


# Admission


@pytest.mark.item(41)
@pytest.mark.parametrize(("num_blocks", "fits"), [(6, True), (5, False)])
def test_request_that_can_never_fit_is_refused_with_the_numbers(num_blocks, fits):
    """8 + 13 tokens, of which 20 are computed: 5 blocks of 4, and the null block."""
    engine = Engine(make_config(num_gpu_blocks_override=num_blocks))
    if fits:
        engine.add("a", range(8), max_tokens=13)
        engine.drain()
        return
    with pytest.raises(ValidationError, match=r"20 tokens .* \(8 of prompt\).* 5 blocks of 4 .* has 4"):
        engine.add("a", range(8), max_tokens=13)
    assert not engine.scheduler.has_work()


@pytest.mark.parametrize("length", [0, 64, 65])
def test_a_prompt_must_be_there_and_leave_room(length):
    with pytest.raises(ValidationError, match=f"has {length} tokens"):
        Engine().add("a", [1] * length)


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    engine = Engine()
    engine.add("a", [1])
    with pytest.raises(ValidationError, match="in use"):
        engine.add("a", [2])
    engine.drain()
    engine.add("a", [2])
    engine.drain()


# Ends


def test_stop_at_an_end_token_reports_why():
    engine = Engine()
    full = run_alone(engine.add("all", range(5), max_tokens=20), engine.config).new_token_ids
    end = full[6]
    count = full.index(end) + 1
    engine.add("eos", range(5), max_tokens=20, eos_token_ids=[end])
    engine.add("stop", range(5), max_tokens=20, stop_token_ids=[end])
    engine.drain()
    for name, stop_reason in [("eos", None), ("stop", end)]:
        assert engine.tokens(name) == full[:count]
        assert (engine.last(name).finish_reason, engine.last(name).stop_reason) == ("stop", stop_reason)
    assert (engine.last("all").finish_reason, engine.last("all").stop_reason) == ("length", None)


@folded("rounds", [1, 8])
@folded("policy", ["fcfs", "priority", "fair"])
def test_a_victim_that_fits_again_at_once_is_planned_once(policy, rounds):
    """Both computed the same prompt in one step; what `b` gives up is a copy of blocks that `a` still holds."""
    limits = {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 9, "num_scheduler_steps": rounds}
    engine = Engine(make_config(scheduling_policy=policy, **limits))
    for name in "ab":
        engine.add(name, range(16))
    engine.step()
    plan = engine.step()
    assert plan.max_decode_steps == 1, "it has blocks for what it computes again, and no others"
    assert (plan.removed_request_ids, new_ids(plan)) == (["b"], ["b"])
    assert [request.request_id for request in plan.scheduled] == ["a", "b"]
    engine.drain()
    assert engine.tokens("a") == engine.tokens("b")


def test_abort_in_each_state_frees_at_once_and_reports_once():
    engine = Engine(make_config(num_gpu_blocks_override=7, enable_prefix_caching=False))
    for name in "abc":
        engine.add(name, range(8), max_tokens=12)
    while not engine.scheduler.stats().num_preemptions:
        engine.step()
    states = [engine.requests[name].status for name in "abc"]
    assert states == [RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.WAITING]
    updates = engine.abort("a", "b", "c", "a", "unknown")
    assert [update.finish_reason for update in updates] == ["abort"] * 3
    assert engine.scheduler.stats().kv_cache_usage == 0.0
    assert engine.abort("a", "b", "c") == []
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.scheduler.has_work(), "the worker still has a row to free"
    assert engine.step().removed_request_ids == ["a"]
    assert not engine.scheduler.has_work()


def test_result_of_an_aborted_request_is_ignored_if_id_is_reused():
    engine = Engine()
    engine.add("a", range(5))
    plan = engine.schedule()
    output = engine.executor.execute_model(plan)
    engine.abort("a")
    request = engine.add("a", range(20, 27))
    engine.finish_step(plan, output)
    assert engine.updates["a"] == []
    plan = engine.step()
    assert (plan.removed_request_ids, new_ids(plan)) == (["a"], ["a"])
    engine.drain()
    assert engine.tokens("a") == run_alone(request, engine.config).new_token_ids


def fail(engine: Engine, name: str) -> None:
    engine.fail(name)
    assert (engine.last(name).finish_reason, engine.last(name).error) == ("error", "logits are not finite")


def num_found(engine: Engine, prompt: range) -> int:
    """Tokens of a prompt that are in the prefix cache, on either tier."""
    name = f"asks {len(engine.requests)}"
    engine.add(name, prompt, max_tokens=1)
    engine.drain()
    return engine.last(name).num_cached_tokens


@folded("kinds", [("full",), ("full", "full"), ("window 6",), ("full", "window 5"), ("full", "state 2")])
@folded("num_steps", [0, 1, 2, 7])
def test_failed_request_affects_no_others_and_leaves_no_cache(kinds, num_steps):
    """Nothing of what it computed in earlier steps either, be it given back already."""
    engine = Engine(None, len(kinds), kinds)
    for name in "ab":
        engine.add(name, range(ord(name), ord(name) + 18))
    for _ in range(num_steps):
        engine.step()
    fail(engine, "a")
    engine.drain()
    assert len(engine.tokens("b")) == 8
    assert num_found(engine, range(ord("a"), ord("a") + 18)) == 0
    assert num_found(engine, range(ord("b"), ord("b") + 18)) > 0


def test_blocks_hit_by_a_failed_request_stay_cached():
    engine = Engine()
    assert num_found(engine, range(9)) == 0
    engine.add("a", range(20))
    fail(engine, "a")
    assert num_found(engine, range(20)) == 8


def test_failed_request_after_a_preemption_leaves_nothing():
    """It found its own blocks, on the device or on the host; they were computed by nobody else."""
    for num_host_blocks in (0, 40):
        config = make_config(num_gpu_blocks_override=9, preemption_mode="swap")
        engine = Engine(config, num_host_blocks=num_host_blocks)
        for name in "ab":
            engine.add(name, range(ord(name), ord(name) + 8), max_tokens=16)
        while engine.requests["b"].num_preemptions == 0:
            engine.step()
        while engine.requests["b"].status is not RequestStatus.RUNNING:
            engine.step()
        fail(engine, "b")
        engine.drain()
        assert num_found(engine, range(ord("b"), ord("b") + 8)) == 0


def test_host_copies_of_a_failed_requests_blocks_are_forgotten():
    config = make_config(num_gpu_blocks_override=6, max_num_batched_tokens=4)
    engine = Engine(config, kinds=("window 4",), num_host_blocks=60)
    engine.add("a", range(30), max_tokens=20)
    for _ in range(8):
        engine.step()
    host = engine.scheduler._kv._pool.host.pool
    assert host.cached_blocks, "what it has given back is on the host only"
    fail(engine, "a")
    assert not host.cached_blocks
    assert num_found(engine, range(30)) == 0


def test_request_sharing_blocks_of_a_failed_one_continues():
    engine = Engine()
    engine.add("a", range(20), max_tokens=20)
    for _ in range(3):
        engine.step()
    engine.add("b", range(20), max_tokens=20)
    engine.add("c", range(20), fork_of="a", max_tokens=20)
    engine.step()
    assert engine.requests["b"].num_cached_tokens == 16
    fail(engine, "a")
    engine.drain()
    for name in "bc":
        assert engine.tokens(name) == run_alone(engine.requests[name], engine.config).new_token_ids
    assert num_found(engine, range(20)) == 0, (
        "the rest of b's and c's answers can only be found behind a prompt"
    )


# Reports


def test_history_goes_with_the_first_and_the_last_update():
    engine = Engine(make_config(max_num_batched_tokens=4))
    engine.add("a", range(6), max_tokens=3, logprobs=1)
    engine.drain()
    updates = engine.updates["a"]
    assert [update.queued_ts for update in updates] == [100.0, 0.0, 100.0]
    assert [update.scheduled_ts for update in updates] == [101.0, 0.0, 101.0]
    assert [[len(entry.token_ids) for entry in update.logprobs] for update in updates] == [[2]] * 3


@about_an_assert
def test_results_must_come_in_the_order_of_the_plans():
    engine = Engine()
    engine.add("a", [1])
    plan = engine.schedule()
    with pytest.raises(AssertionError, match="out of order"):
        engine.scheduler.update_from_output(plan, ModelRunnerOutput(plan.step_id + 1, {}), 0.0)


@about_an_assert
def test_a_missing_sample_is_noticed():
    engine = Engine()
    engine.add("a", [1])
    plan = engine.schedule()
    with pytest.raises(AssertionError, match="for 1 samples"):
        engine.scheduler.update_from_output(plan, ModelRunnerOutput(plan.step_id, {}), 0.0)


def test_integrity_covers_the_queues():
    engine = Engine()
    engine.add("a", [1])
    engine.scheduler._queues.running.add(engine.requests["a"])
    with pytest.raises(IntegrityError, match="in no queue, or in two"):
        engine.scheduler.check_integrity()


def test_a_plan_of_moves_alone_is_executed():
    """An empty one is not, and they would be lost."""
    engine = Engine()
    engine.scheduler._kv._pool._moves.copy(1, 2)
    plan = engine.scheduler.schedule(engine.now)
    assert plan.block_copies == [(1, 2)]
    assert not plan.is_empty
