"""A full queue refuses with the numbers, and every way out of it makes room."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig, SchedulerConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.queue_limits import WaitingSequences, check_queue
from quire.errors import UnavailableError
from quire.sampling_params import SamplingParams


def waiting(*num_prompt_tokens: int) -> WaitingSequences:
    sequences = WaitingSequences()
    for index, num_tokens in enumerate(num_prompt_tokens):
        sequences.add(str(index), num_tokens)
    return sequences


def test_without_limits_anything_may_wait() -> None:
    check_queue(SchedulerConfig(), waiting(10**6), 10**6, 10**6)


@pytest.mark.parametrize(
    ("num_waiting", "num_more", "fits"), [(3, 1, True), (3, 2, False), (4, 1, False), (0, 9, True)]
)
def test_the_limit_on_sequences(num_waiting: int, num_more: int, fits: bool) -> None:
    limits = SchedulerConfig(max_num_queued_reqs=4)
    if fits:
        check_queue(limits, waiting(*[1] * num_waiting), num_more, 0)
        return
    with pytest.raises(
        UnavailableError, match=f"{num_waiting} sequences .* {num_more} more .* limit of 4"
    ) as caught:
        check_queue(limits, waiting(*[1] * num_waiting), num_more, 0)
    assert caught.value.retry_after > 0


@pytest.mark.parametrize(
    ("tokens", "num_more", "fits"),
    [((60,), 40, True), ((60,), 41, False), ((60, 40), 0, False), ((), 500, True)],
)
def test_the_limit_on_prompt_tokens(tokens: tuple[int, ...], num_more: int, fits: bool) -> None:
    limits = SchedulerConfig(max_num_queued_tokens=100)
    if fits:
        check_queue(limits, waiting(*tokens), 1, num_more)
        return
    with pytest.raises(UnavailableError, match=rf"{sum(tokens)} tokens wait .* limit of 100 tokens"):
        check_queue(limits, waiting(*tokens), 1, num_more)


def make_engine(model_dir: Path, **args: Any) -> AsyncLLM:
    config = EngineConfig.from_args(model=str(model_dir), distributed_executor_backend="null", **args)
    return AsyncLLM(config, in_process=True)


@pytest.mark.item(28)
async def test_of_many_at_once_exactly_the_limit_is_admitted(null_model_dir: Path) -> None:
    """The core is not asked, so nothing has a first token while they come."""
    engine = make_engine(null_model_dir, max_num_queued_reqs=8)
    await engine.wait_ready()
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)

    async def run(index: int) -> str:
        try:
            async for output in engine.generate([1, 2, 3], sampling, str(index)):
                last = output
        except UnavailableError:
            return "refused"
        return str(last.outputs[0].finish_reason)

    for _ in range(2):
        ends = await asyncio.gather(*(run(index) for index in range(100)))
        assert (ends.count("length"), ends.count("refused")) == (8, 92)
    await engine.shutdown()


@pytest.mark.item(29)
async def test_prompts_of_many_tokens_do_not_pass_the_limit_on_tokens(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir, max_num_queued_tokens=200)
    await engine.wait_ready()
    streams = [engine.generate([1] * 90, SamplingParams(max_tokens=2), str(index)) for index in range(10)]
    first = await asyncio.gather(*(anext(stream) for stream in streams), return_exceptions=True)
    assert sum(isinstance(outcome, UnavailableError) for outcome in first) == 8
    for stream in streams:
        await stream.aclose()
    await engine.shutdown()


@pytest.mark.item(28)
async def test_every_end_leaves_the_queue(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir)
    await engine.wait_ready()
    queue = engine.output_processor.waiting
    ended = engine.generate([1, 2, 3], SamplingParams(max_tokens=1), "ended")
    await anext(ended)
    assert (len(queue), queue.num_tokens) == (0, 0)
    task = asyncio.create_task(anext(engine.generate([1] * 5, SamplingParams(n=2), "cancelled")))
    while not len(queue):  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    assert (len(queue), queue.num_tokens) == (2, 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await ended.aclose()
    await asyncio.sleep(0)
    assert (len(queue), queue.num_tokens) == (0, 0)
    lost = asyncio.create_task(anext(engine.generate([1] * 5, SamplingParams(), "lost")))
    while not len(queue):  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    await engine.shutdown()
    await asyncio.gather(lost, return_exceptions=True)
    assert (len(queue), queue.num_tokens) == (0, 0)
