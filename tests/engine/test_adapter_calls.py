# SPDX-License-Identifier: Apache-2.0
"""Adapters are loaded by messages, in parallel with the steps of other requests."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest, EngineCoreRequest, UtilityCall, UtilityResult
from quire.engine.startup import prepare
from quire.errors import ValidationError
from quire.sampling_params import SamplingParams

NUM_STREAMS = 16
A = LoRARequest("a", 1, "path")


def core_with_streams(model: Path, **args: Any) -> tuple[EngineCore, Future[None]]:
    """A core with sixteen requests that go on, and the reading of an adapter that takes as long as the test likes."""
    fixed = {"model": str(model), "distributed_executor_backend": "null", "enable_lora": True}
    core = EngineCore(prepare(EngineConfig.from_args(**fixed, **args), "offline"))
    reading: Future[None] = Future()
    core.executor.prepare_adapter = lambda request: reading  # type: ignore[method-assign]
    for number in range(NUM_STREAMS):
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        core.handle(AddRequest(EngineCoreRequest(str(number), [number, 2, 3], params, 0.0)))
    return core, reading


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_step_waits_for_an_adapter(async_scheduling: bool, null_model_dir: Path) -> None:
    core, reading = core_with_streams(null_model_dir, async_scheduling=async_scheduling)
    core.step()
    assert core.handle(UtilityCall(7, "add_lora", [msgspec.to_builtins(A)])) is None
    for _ in range(20):
        assert len(core.step().updates) == NUM_STREAMS
        assert core.pop_answers() == []
    reading.set_result(None)
    assert len(core.step().updates) == NUM_STREAMS
    (answer,) = core.pop_answers()
    assert (answer.call_id, answer.result, answer.error) == (7, True, None)
    for call, result in (
        (UtilityCall(8, "add_lora", [msgspec.to_builtins(A)]), True),
        (UtilityCall(9, "list_loras"), [1]),
        (UtilityCall(10, "remove_lora", [5]), False),
    ):
        told = core.handle(call)
        assert isinstance(told, UtilityResult)
        assert told.result == result
    core.shutdown()


def test_unusable_adapter_fails_only_its_caller(null_model_dir: Path) -> None:
    core, reading = core_with_streams(null_model_dir)
    core.handle(UtilityCall(7, "add_lora", [msgspec.to_builtins(A)]))
    reading.set_exception(ValidationError("it is no adapter"))
    assert {update.finish_reason for update in core.step().updates} == {None}
    (answer,) = core.pop_answers()
    assert (answer.error, answer.refused) == ("it is no adapter", True)
    core.shutdown()
