# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from quire.executor.null import DEFAULT_NUM_BLOCKS
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, ScheduledRequest, SchedulerOutput
from tests.scheduler.harness import Engine, make_config


@pytest.fixture
def steps():
    """An engine that has run `a` for two steps, and the plan of its third, not yet executed."""
    engine = Engine()
    engine.add("a", range(7))
    engine.step()
    engine.step()
    return engine, engine.schedule()


def change(plan: SchedulerOutput, **fields) -> SchedulerOutput:
    return msgspec.structs.replace(plan, **fields)


def scheduled(**fields) -> list[ScheduledRequest]:
    given = {"request_id": "a", "start": 8, "num_tokens": 1, "num_samples": 1, "new_block_ids": [[3]]}
    return [ScheduledRequest(**given | fields)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 999}, "step protocol version"),
        ({"step_id": 2}, "step 2 after step 2"),
        ({"scheduled": scheduled(request_id="b")}, "b is not new and has no row"),
        ({"scheduled": scheduled(num_tokens=0)}, "without tokens"),
        ({"scheduled": scheduled(num_tokens=17)}, "budget of 16"),
        ({"scheduled": scheduled(num_tokens=2)}, "token 10 of 9 planned"),
        ({"scheduled": scheduled(num_samples=0)}, "is to have 1 samples"),
        ({"scheduled": scheduled(num_tokens=2, draft_token_ids=[5])}, "is to have 2 samples"),
        ({"scheduled": scheduled(draft_token_ids=[5])}, "without tokens"),
        ({"removed_request_ids": ["b"]}, "has no row"),
        ({"removed_request_ids": ["a"]}, "has no row"),
        ({"scheduled": scheduled() * 2}, "planned twice"),
        ({"scheduled": scheduled(start=7)}, "but 8 tokens are computed"),
        ({"scheduled": scheduled(new_block_ids=[[]])}, "no block covers token 8"),
        ({"scheduled": scheduled(new_block_ids=[[0]])}, "no such blocks"),
        ({"scheduled": scheduled(new_block_ids=[[65]])}, "no such blocks"),
        ({"scheduled": scheduled(new_block_ids=[[1]])}, "twice in"),
        ({"swap_outs": [(1, 1)]}, "copied to: no such blocks"),
        ({"swap_ins": [(1, 9)]}, "copied from: no such blocks"),
        ({"block_copies": [(0, 9)]}, "copied from: no such blocks"),
        ({"block_copies": [(1, 65)]}, "copied to: no such blocks"),
        ({"block_copies": [(1, 9), (2, 9)]}, "written twice"),
        ({"block_copies": [(1, 8), (8, 9)]}, "read and written"),
        ({"block_copies": [(1, 2)]}, r"blocks \[2\] are written, and rows hold them"),
    ],
)
def test_a_plan_that_breaks_a_promise_is_refused(steps, fields, message):
    engine, plan = steps
    with pytest.raises(AssertionError, match=message):
        engine.executor.execute_model(change(plan, **fields))


def test_the_plan_that_the_cases_above_change_is_a_good_one(steps):
    engine, plan = steps
    assert plan.scheduled == scheduled()
    engine.finish_step(plan, engine.executor.execute_model(plan))
    engine.drain()


def test_a_prefix_that_is_not_in_the_cache_is_noticed():
    engine = Engine()
    engine.add("a", range(9))
    engine.drain()
    engine.add("b", range(9))
    plan = engine.schedule()
    (data,) = plan.new_requests
    assert data.num_computed_tokens == 8
    other = msgspec.structs.replace(data, token_ids=[99, *data.token_ids[1:]])
    with pytest.raises(AssertionError, match="does not hold the prefix to token 0"):
        engine.executor.execute_model(change(plan, new_requests=[other]))


def test_writing_to_a_shared_block_is_noticed():
    engine = Engine()
    engine.add("a", range(6))
    engine.step()
    engine.add("b", range(50, 56))
    plan = engine.schedule()
    (data,) = plan.new_requests
    shared = msgspec.structs.replace(data, block_ids=[[2, 1]])
    with pytest.raises(AssertionError, match="writes to a shared block"):
        engine.executor.execute_model(change(plan, new_requests=[shared]))


def resumed_after(moves: dict[str, list[tuple[int, int]]]) -> None:
    """Swap a request's two blocks out, then let it return in blocks 5 and 6 after these moves."""
    engine = Engine(num_host_blocks=4)
    engine.add("a", range(7))
    engine.step()
    empty = SchedulerOutput(2, [], [], ["a"], swap_outs=[(1, 1), (2, 2)])
    engine.executor.execute_model(empty)
    data = NewRequestData("a", [*range(7)], 7, SamplingParams(), [[5, 6]], 6)
    scheduled = [ScheduledRequest("a", 6, 1, 1, [])]
    engine.executor.execute_model(SchedulerOutput(3, [data], scheduled, [], **moves))


@pytest.mark.parametrize(
    ("moves", "token"),
    [
        ({}, 0),
        ({"swap_ins": [(1, 5)]}, 4),
        ({"swap_ins": [(2, 5), (1, 6)]}, 0),
        ({"swap_ins": [(1, 5), (3, 6)]}, 4),
    ],
)
def test_leaked_block_is_detected(moves, token):
    with pytest.raises(AssertionError, match=f"does not hold the prefix to token {token}"):
        resumed_after(moves)


def test_swapped_in_blocks_are_unchanged():
    resumed_after({"swap_ins": [(1, 5), (2, 6)]})
    resumed_after({"swap_ins": [(1, 3), (2, 4)], "block_copies": [(3, 5), (4, 6)]})


def test_min_tokens_keeps_end_tokens_away():
    engine = Engine()
    end = list(range(39))
    engine.add("a", [1, 2, 3], max_tokens=9, min_tokens=5, stop_token_ids=end)
    engine.drain()
    assert engine.tokens("a")[:5] == [39] * 5


def test_only_allowed_tokens_come():
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=30, min_tokens=10, allowed_token_ids=[5, 7, 9], stop_token_ids=[9])
    engine.drain()
    assert set(engine.tokens("a")[:10]) == {5, 7}
    assert set(engine.tokens("a")) <= {5, 7, 9}


@pytest.mark.parametrize(("asked", "listed"), [(0, 1), (3, 4), (-1, 41)])
def test_logprobs_list_the_chosen_token_first(asked, listed):
    engine = Engine(make_config(max_num_batched_tokens=3))
    engine.add("a", range(20, 27), max_tokens=2, logprobs=asked, prompt_logprobs=asked)
    engine.drain()
    updates = engine.updates["a"]
    entries = [entry for update in updates for entry in update.prompt_logprobs or []]
    assert [entry.token_ids[0] for entry in entries] == list(range(21, 27))
    entries += [entry for update in updates for entry in update.logprobs or []]
    assert [len(entry.token_ids) for entry in entries] == [listed] * 8
    assert all(len(entry.logprobs) == listed for entry in entries)


def test_the_contract_of_an_executor():
    executor = Engine(make_config(num_gpu_blocks_override=10)).executor
    executor.load()
    (spec,) = executor.kv_cache_specs().values()
    assert executor.kv_memory().free_bytes == DEFAULT_NUM_BLOCKS * spec.block_bytes
    executor.shutdown()
    executor.shutdown()
