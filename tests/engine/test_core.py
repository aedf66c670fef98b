# SPDX-License-Identifier: Apache-2.0
"""The core alone: every time that it states is of the clock that it is given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequests, AddRequest, EngineCoreOutputs, EngineCoreRequest
from quire.engine.startup import prepare
from quire.executor.null import NUM_POOLED
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

STEP_S = 3600.0
"""A clock that nobody's watch shows."""


class FakeClock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def simulate(model: Path, **args: Any) -> Iterator[EngineCoreOutputs]:
    """Four requests that come one step apart, in a world where a step takes an hour."""
    fixed = {"model": str(model), "distributed_executor_backend": "null", "max_num_seqs": 2}
    clock = FakeClock()
    core = EngineCore(prepare(EngineConfig.from_args(**fixed, **args), "offline"), clock)
    assert core.ready.load_s == 0.0
    for number in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        request = EngineCoreRequest(f"{number}", [number, 2, 3], params, arrival_time=clock.now)
        core.handle(AddRequest(request))
        clock.now += STEP_S
        yield core.step()
    while core.has_work():
        clock.now += STEP_S
        yield core.step()
    explained = core.explain("3")
    assert explained is not None
    assert explained.waited_ns % int(STEP_S * 1e9) == 0 < explained.waited_ns
    core.shutdown()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_core_takes_times_from_its_clock(async_scheduling: bool, null_model_dir: Path) -> None:
    runs = [list(simulate(null_model_dir, async_scheduling=async_scheduling)) for _ in range(2)]
    first, second = ([msgspec.msgpack.encode(outputs) for outputs in run] for run in runs)
    assert first == second, "the same events at the same times give the same, times included"
    times = [
        time
        for outputs in runs[0]
        for update in outputs.updates
        for time in (outputs.timestamp, update.queued_ts, update.scheduled_ts)
        if time
    ]
    assert times
    assert all(time >= 1_000_000.0 and (time - 1_000_000.0) % STEP_S == 0 for time in times)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_pooling_request_and_answer_are_one_message_each(
    async_scheduling: bool, null_model_dir: Path
) -> None:
    args = {"model": str(null_model_dir), "distributed_executor_backend": "null"}
    core = EngineCore(prepare(EngineConfig.from_args(**args, async_scheduling=async_scheduling), "offline"))
    wanted = EngineCoreRequest("a", [1, 2, 3], SamplingParams(), 0.0, pooling_params=PoolingParams())
    core.handle(msgspec.msgpack.decode(msgspec.msgpack.encode(AddRequest(wanted)), type=AddRequest))
    told = [msgspec.msgpack.encode(core.step()) for _ in range(2)]
    updates = [one for data in told for one in msgspec.msgpack.decode(data, type=EngineCoreOutputs).updates]
    assert [(one.finish_reason, one.new_token_ids, one.pooled and one.pooled.shape) for one in updates] == [
        ("stop", [], [NUM_POOLED])
    ]
    assert not core.scheduler.has_unfinished_requests()
    core.shutdown()


@pytest.mark.item(39)
def test_core_reports_the_cost_of_aborted_requests(null_model_dir: Path) -> None:
    """One in the middle of its prompt, one in the queue, one with tokens, one of nobody."""
    args: dict[str, Any] = {"distributed_executor_backend": "null", "max_num_batched_tokens": 16}
    args |= {"max_num_seqs": 3, "scheduling_policy": "fcfs", "enable_prefix_caching": False}
    core = EngineCore(prepare(EngineConfig.from_args(model=str(null_model_dir), **args), "offline"))
    for name, length in (("done", 4), ("long", 40), ("nobody", 40), ("waits", 40)):
        tenant = "" if name == "nobody" else f"of {name}"
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        core.handle(AddRequest(EngineCoreRequest(name, list(range(length)), params, 0.0, tenant=tenant)))
    core.step()
    core.step()
    answer = core.handle(AbortRequests(["done", "long", "nobody", "waits", "unknown"]))
    assert isinstance(answer, EngineCoreOutputs)
    assert answer.spent.keys() == {"of long"}
    assert 12 <= answer.spent["of long"] < 40
    assert core.handle(AbortRequests(["long"])) is None
    core.shutdown()
