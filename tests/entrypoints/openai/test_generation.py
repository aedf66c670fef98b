# SPDX-License-Identifier: Apache-2.0
"""Outputs of several prompts: order, gathering, and that every way out closes every generator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.engine.queue_limits import QueueReservation, WaitingSequences
from quire.entrypoints.openai.generation import Outputs
from quire.errors import EngineDeadError, EngineError
from quire.sampling_params import RequestOutputKind, SamplingParams
from tests.entrypoints.openai.fake_engine import FakeEngine


def outputs_for(engine: FakeEngine, num_prompts: int = 3, *, delta: bool = True, **options: Any) -> Outputs:
    kind = RequestOutputKind.DELTA if delta else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(max_tokens=20, output_kind=kind)
    prompts = [{"prompt_token_ids": [97 + index]} for index in range(num_prompts)]
    return Outputs(engine, prompts, params, "r", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("interval", [1, 2, 4, 100])
@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_gathering_keeps_every_token(engine: FakeEngine, num_prompts: int, interval: int) -> None:
    texts = dict.fromkeys(range(num_prompts), "")
    sizes: list[int] = []
    async for index, output in outputs_for(engine, num_prompts, stream_interval=interval):
        texts[index] += output.outputs[0].text
        if index == 0:
            sizes.append(len(output.outputs[0].token_ids))
    assert set(texts.values()) == {"Reply 0!"}
    assert sizes[0] == 1, "the first token must not wait"
    assert all(size == interval for size in sizes[1:-1])
    assert sum(sizes) == 9


async def test_final_is_in_the_order_of_prompts(engine: FakeEngine) -> None:
    engine.reply = lambda prompt, index: "x" * (ord(prompt[0]) - 96) if prompt != "b" else ""
    finals = await outputs_for(engine, delta=False).final()
    assert [output.outputs[0].text for output in finals] == ["x", "", "xxx"]


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("num_read", [0, 1, 5])
async def test_closing_early_closes_all(engine: FakeEngine, num_prompts: int, num_read: int) -> None:
    outputs = outputs_for(engine, num_prompts)
    for _ in range(num_read):
        await anext(outputs)
    await outputs.aclose()
    assert not engine.running


async def test_priming_does_not_lose_the_first_output(engine: FakeEngine) -> None:
    outputs = outputs_for(engine, 1)
    await outputs.prime(60)
    assert "".join([output.outputs[0].text async for _, output in outputs]) == "Reply 0!"


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_priming_of_a_silent_engine_ends_and_loses_nothing(
    engine: FakeEngine, num_prompts: int
) -> None:
    engine.hold_after = 0
    outputs = outputs_for(engine, num_prompts)
    await outputs.prime(0.001)
    assert len(engine.running) == num_prompts
    engine.died.set()  # nobody died: what was held goes on
    texts = [""] * num_prompts
    async for index, output in outputs:
        texts[index] += output.outputs[0].text
    assert texts == ["Reply 0!"] * num_prompts


async def test_priming_of_a_request_not_queued_yet_waits_on(engine: FakeEngine) -> None:
    place = QueueReservation(WaitingSequences(), 2)  # of two sequences one will have joined
    outputs = outputs_for(engine, 1, place=place)
    engine.hold_after = 0
    priming = asyncio.create_task(outputs.prime(0.001))
    while not engine.running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    done, _ = await asyncio.wait({priming}, timeout=0.05)
    assert not done
    place.release()
    await priming
    await outputs.aclose()
    assert not engine.running


@pytest.mark.parametrize("how", ["cancelled", "failed", "closed"])
async def test_priming_that_ends_early_leaves_nothing_running(engine: FakeEngine, how: str) -> None:
    engine.hold_after, engine.fail_after = (0, None) if how != "failed" else (None, 0)
    outputs = outputs_for(engine, 2)
    priming = asyncio.create_task(outputs.prime(60 if how != "closed" else 0.001))
    while len(engine.running) < 2 and not priming.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    if how == "cancelled":
        priming.cancel()
    (error,) = await asyncio.gather(priming, return_exceptions=True)
    assert isinstance(error, {"cancelled": asyncio.CancelledError, "failed": EngineError}.get(how, object))
    if how == "closed":
        await outputs.aclose()
    assert not engine.running


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_failures_end_everything(engine: FakeEngine, num_prompts: int) -> None:
    engine.fail_after = 2
    with pytest.raises(EngineError, match="failed in the engine"):
        [output async for output in outputs_for(engine, num_prompts)]
    engine.fail_after, engine.die_after = None, 2
    with pytest.raises(EngineDeadError):
        await outputs_for(engine, num_prompts).final()
    assert not engine.running


async def test_cancelling_the_reader_closes_all(engine: FakeEngine) -> None:
    engine.hold_after = 2
    reader = asyncio.create_task(outputs_for(engine).final())
    while len(engine.running) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert not engine.running
