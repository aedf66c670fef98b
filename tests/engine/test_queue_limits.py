# SPDX-License-Identifier: Apache-2.0
"""A full queue refuses with the numbers, and every way out of it makes room."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineConfig, SchedulerConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.queue_limits import QueueReservation, WaitingSequences, check_queue, check_tokens, crowding
from quire.errors import UnavailableError, ValidationError
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams


def waiting(*num_prompt_tokens: int) -> WaitingSequences:
    sequences = WaitingSequences()
    for index, num_tokens in enumerate(num_prompt_tokens):
        sequences.add(str(index), num_tokens)
    return sequences


def test_without_limits_anything_may_wait() -> None:
    limits = SchedulerConfig(max_num_queued_reqs=0)
    check_queue(limits, waiting(10**6), 10**6)
    check_tokens(limits, waiting(10**6), 10**6)
    assert crowding(limits, waiting(10**6)) is None


@pytest.mark.parametrize(
    ("num_waiting", "num_more", "fits"), [(3, 1, True), (3, 2, False), (4, 1, False), (0, 9, True)]
)
def test_the_limit_on_sequences(num_waiting: int, num_more: int, fits: bool) -> None:
    limits = SchedulerConfig(max_num_queued_reqs=4)
    if fits:
        check_queue(limits, waiting(*[1] * num_waiting), num_more)
        return
    with pytest.raises(
        UnavailableError, match=f"{num_waiting} sequences .* {num_more} more .* limit of 4"
    ) as caught:
        check_queue(limits, waiting(*[1] * num_waiting), num_more)
    assert caught.value.retry_after > 0


@pytest.mark.parametrize(
    ("tokens", "num_more", "fits"),
    [((60,), 40, True), ((60,), 41, False), ((60, 40), 0, False), ((), 500, True)],
)
def test_the_limit_on_prompt_tokens(tokens: tuple[int, ...], num_more: int, fits: bool) -> None:
    limits = SchedulerConfig(max_num_queued_tokens=100)
    if fits:
        check_tokens(limits, waiting(*tokens), max(num_more, 1))
        return
    with pytest.raises(UnavailableError, match=rf"{sum(tokens)} tokens wait .* limit of 100 tokens"):
        check_tokens(limits, waiting(*tokens), max(num_more, 1))


@pytest.mark.item(28)
def test_by_default_the_queue_has_an_end() -> None:
    most = SchedulerConfig().max_num_queued_reqs
    assert most >= 2**14, "nobody is to meet it by accident"
    with pytest.raises(UnavailableError, match="the queue is full"):
        check_queue(SchedulerConfig(), waiting(*[0] * most), 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100)), max_size=8), st.integers(0, 20))
def test_reserved_place_counts_until_joined_or_released(
    joins: list[tuple[int, int]], num_sequences: int
) -> None:
    queue = waiting(5)
    place = QueueReservation(queue, num_sequences)
    num_tokens = sum(tokens for _, tokens in joins)
    place.hold(num_tokens)
    assert (len(queue), queue.num_tokens) == (1 + num_sequences, 5 + num_tokens)
    for sequences, tokens in joins:
        place.join(sequences, tokens)
        num_sequences, num_tokens = max(0, num_sequences - sequences), num_tokens - tokens
        assert (len(queue), queue.num_tokens) == (1 + num_sequences, 5 + num_tokens)
    for _ in range(2):
        place.release()
        assert (len(queue), queue.num_tokens) == (1, 5)


@pytest.mark.item(44)
@pytest.mark.parametrize(
    ("limits", "queue", "what"),
    [
        ({"max_num_queued_reqs": 10}, waiting(*[1] * 8), None),
        ({"max_num_queued_reqs": 10}, waiting(*[1] * 9), "9 sequences .* limit is 10"),
        ({"max_num_queued_tokens": 100}, waiting(50, 39), None),
        ({"max_num_queued_tokens": 100}, waiting(50, 40), "90 prompt tokens .* limit is 100"),
    ],
)
def test_nearly_full_queue_is_reported(limits: Any, queue: WaitingSequences, what: str | None) -> None:
    told = crowding(SchedulerConfig(**limits), queue)
    assert told is None if what is None else re.search(what, told or "")


def make_engine(model_dir: Path, **args: Any) -> AsyncLLM:
    config = EngineConfig.from_args(model=str(model_dir), distributed_executor_backend="null", **args)
    return AsyncLLM(config, in_process=True)


@pytest.mark.item(28)
async def test_concurrent_requests_are_admitted_up_to_the_limit(null_model_dir: Path) -> None:
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


@pytest.mark.item(28)
async def test_request_being_tokenized_holds_a_queue_place(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has come to the core yet, and the place of one that is refused is free again."""
    engine = make_engine(null_model_dir, max_num_queued_reqs=2)
    await engine.wait_ready()
    queue, may_go_on = engine.output_processor.waiting, asyncio.Event()
    tokenize = engine._tokenize

    async def later(prompt: Any, adapter: Any) -> Any:
        await may_go_on.wait()
        return await tokenize(prompt, adapter)

    monkeypatch.setattr(engine, "_tokenize", later)
    prompts: list[Any] = [[1], [10**9]]
    streams = [engine.generate(prompt, SamplingParams(max_tokens=1), "x") for prompt in prompts]
    tasks = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="2 sequences wait"):
        await anext(engine.generate([1], SamplingParams(), "too much"))
    with pytest.raises(UnavailableError, match="2 sequences wait"), engine.reserve():
        pass
    assert engine.crowding()
    may_go_on.set()
    done, refused = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done, RequestOutput)
    assert done.outputs[0].finish_reason == "length"
    assert isinstance(refused, ValidationError)
    assert len(queue) == 0
    assert engine.crowding() is None
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
