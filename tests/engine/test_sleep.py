# SPDX-License-Identifier: Apache-2.0
"""An engine that sleeps gives memory back, stands still, and wakes as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import DEMO_MODEL
from quire.engine.async_llm import AsyncLLM
from quire.engine.client import ProcessClient
from quire.engine.sleep_state import LEVELS, MODES, TAGS, EngineSleepState, check_tags
from quire.engine.trace import read_trace, replay
from quire.errors import ConflictError, UnavailableError, ValidationError
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.slow_schedulers import Slow, hold_cores, release_cores
from tests.engine.test_restart import started
from tests.engine.whole_engine import WholeEngine, alone, check_result
from tests.fixtures.folded import folded
from tests.fixtures.quick import quick

MODEL = Path(DEMO_MODEL)
PROMPT = [3, 1, 4, 1, 5] * 8


def params(num_tokens: int = 40, **fields: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=num_tokens, seed=7, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **fields
    )


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.more)], ids=["in process", "other process"]
)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[AsyncLLM]:
    engine = await started(MODEL, in_process=request.param)
    yield engine
    await engine.shutdown()


async def generate(engine: AsyncLLM, name: str, sampling: SamplingParams) -> RequestOutput:
    return [output async for output in engine.generate({"prompt_token_ids": PROMPT}, sampling, name)][-1]


async def num_running(engine: AsyncLLM) -> int:
    return (await engine.call_core("stats")).get("num_running", 0)  # type: ignore[no-any-return]


async def until_running(engine: AsyncLLM) -> None:
    while await num_running(engine) == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keep requests that run in this block from their ends."""
    hold_cores()
    try:
        yield
    finally:
        release_cores()


@pytest.mark.parametrize("level", LEVELS)
async def test_requests_that_are_kept_go_on_with_the_same_tokens(engine: AsyncLLM, level: int) -> None:
    expected = await generate(engine, "before", params())
    with held():
        tasks = [asyncio.create_task(generate(engine, f"{i}", params())) for i in range(3)]
        await until_running(engine)
        await engine.sleep(level, "keep")
    assert (await num_running(engine) > 0) == (level == 0)
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in tasks)
    await engine.wake_up()
    for task in tasks:
        assert (await task).outputs == expected.outputs


@pytest.mark.parametrize("level", LEVELS)
async def test_abort_ends_requests_and_wait_waits_for_them(engine: AsyncLLM, level: int) -> None:
    with held():
        running = asyncio.create_task(generate(engine, "a", params(60)))
        await until_running(engine)
        await engine.sleep(level, "abort")
    assert (await running).outputs[0].finish_reason == "abort"
    await engine.wake_up()
    running = asyncio.create_task(generate(engine, "b", params(20)))
    await until_running(engine)
    await engine.sleep(level, "wait")
    assert running.done()
    assert running.result().outputs[0].finish_reason == "length"


async def test_sleeping_engine_accepts_no_requests(engine: AsyncLLM) -> None:
    await engine.sleep(1)
    assert engine.is_sleeping
    with pytest.raises(UnavailableError, match="sleeps"):
        await generate(engine, "a", params())
    await engine.wake_up(["weights"])
    with pytest.raises(UnavailableError, match="sleeps"):
        await generate(engine, "a", params())
    assert engine.asleep == ["kv_cache", "scheduling"]
    await engine.wake_up(["kv_cache"])
    assert not engine.is_sleeping
    assert (await generate(engine, "a", params())).finished


@pytest.mark.parametrize("level", LEVELS)
async def test_prefixes_are_forgotten_with_the_cache(engine: AsyncLLM, level: int) -> None:
    await generate(engine, "a", params())
    await engine.sleep(level)
    await engine.wake_up()
    again = await generate(engine, "b", params())
    assert (again.num_cached_tokens > 0) == (level == 0)


async def test_sleeping_twice_and_waking_twice_is_fine(engine: AsyncLLM) -> None:
    await engine.wake_up()
    for level in (0, 1, 0, 2, 1):
        await engine.sleep(level)
    assert engine.asleep == sorted(TAGS)
    for _ in range(2):
        await engine.wake_up()
        assert engine.asleep == []
    assert (await generate(engine, "a", params())).finished


async def test_a_sleep_that_waits_can_be_called_off(engine: AsyncLLM) -> None:
    with held():
        running = asyncio.create_task(generate(engine, "a", params(90)))
        await until_running(engine)
        waiting = asyncio.create_task(engine.sleep(1, "wait"))
        while not engine.is_sleeping:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            await generate(engine, "b", params())
        await engine.wake_up()
    with pytest.raises(ConflictError, match="woken"):
        await waiting
    assert (await generate(engine, "b", params())).finished
    assert (await running).outputs[0].finish_reason == "length"


async def test_caller_that_disconnects_leaves_the_engine_awake(engine: AsyncLLM) -> None:
    with held():
        running = asyncio.create_task(generate(engine, "a", params(60)))
        await until_running(engine)
        waiting = asyncio.create_task(engine.sleep(1, "wait"))
        while not engine.is_sleeping:  # noqa: ASYNC110
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert (await generate(engine, "b", params(2))).finished
    await running


async def test_deadlines_hold_while_asleep(engine: AsyncLLM) -> None:
    async def timed() -> RequestOutput:
        stream = engine.generate({"prompt_token_ids": PROMPT}, params(60), "a", timeout_s=0.2)
        return [output async for output in stream][-1]

    running = asyncio.create_task(timed())
    await until_running(engine)
    await engine.sleep(1, "keep")
    assert (await running).outputs[0].finish_reason == "timeout"
    await engine.wake_up()
    assert (await generate(engine, "b", params())).finished


async def test_wake_up_completes_if_the_caller_disconnects(engine: AsyncLLM) -> None:
    await engine.sleep(1)
    waking = asyncio.create_task(engine.wake_up())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # it is on its way
    waking.cancel()
    await asyncio.gather(waking, return_exceptions=True)
    await engine.wake_up(["scheduling"])  # behind it, and wrong while anything else sleeps
    assert not engine.is_sleeping
    assert (await generate(engine, "a", params(2))).finished


@pytest.mark.parametrize("tags", quick([[], ["weights"]], [["weights"]]))
async def test_replacement_core_sleeps_at_the_same_level(tags: list[str]) -> None:
    engine = await started(MODEL)
    expected = await generate(engine, "before", params())
    with held():
        running = asyncio.create_task(generate(engine, "a", params()))
        await until_running(engine)
        await engine.sleep(2, "keep")
    await engine.wake_up(tags)
    (client,) = engine._clients
    assert isinstance(client, ProcessClient)
    os.kill(client.process.pid, signal.SIGKILL)
    while engine._clients[0] is client:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await num_running(engine) == 0
    assert not running.done()
    assert engine.asleep == [tag for tag in sorted(TAGS) if tag not in tags]
    await engine.wake_up()
    assert (await running).outputs == expected.outputs
    await engine.shutdown()


async def test_an_engine_that_loads_cannot_sleep_and_ends_nothing() -> None:
    engine = await started(MODEL)
    with held():
        running = asyncio.create_task(generate(engine, "a", params()))
        await until_running(engine)
        (client,) = engine._clients
        assert isinstance(client, ProcessClient)
        os.kill(client.process.pid, signal.SIGKILL)
    while engine.is_ready:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(UnavailableError, match="before it is ready"):
        await engine.sleep(1, "abort")
    assert (await running).outputs[0].finish_reason == "length"
    await engine.shutdown()


class SleeplessOnce(Slow):
    """The first of its kind fails in the middle of falling asleep."""

    def forget(self, now: float) -> None:
        first = Path(os.environ["SLEEPLESS"])
        if not first.exists():
            first.touch()
            raise RuntimeError("no rest")
        super().forget(now)


@pytest.mark.more
async def test_core_failing_to_sleep_is_replaced_by_a_sleeping_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEPLESS", str(tmp_path / "failed"))
    engine = await started(MODEL, SleeplessOnce)
    (first,) = engine._clients
    running = asyncio.create_task(generate(engine, "a", params()))
    await until_running(engine)
    await engine.sleep(1, "keep")
    assert engine._clients[0] is not first
    assert await num_running(engine) == 0
    await engine.wake_up()
    assert (await running).finished
    await engine.shutdown()


@folded("bad", [-1, 3, True, "1", None, 1.5])
async def test_invalid_sleep_arguments_are_refused(bad: Any) -> None:
    engine = await started(MODEL, in_process=True)
    with pytest.raises(ValidationError, match="level must be one of 0, 1, 2"):
        await engine.sleep(bad)
    with pytest.raises(ValidationError, match="mode must be one of abort, wait, keep"):
        await engine.sleep(1, bad)
    with pytest.raises(ValidationError, match="tags must be of weights, kv_cache, scheduling"):
        await engine.wake_up([bad])
    assert not engine.is_sleeping
    await engine.shutdown()


@given(st.lists(st.one_of(st.sampled_from(list(LEVELS)), st.sets(st.sampled_from(TAGS)))))
def test_rest_can_be_reached_by_its_verbs(events: list[Any]) -> None:
    """Replaying the verbs of a sleep state puts a new core into that state."""
    rest = EngineSleepState()
    for event in events:
        try:
            rest = rest.deeper(event) if isinstance(event, int) else rest.without(check_tags(event))
        except ConflictError:
            continue
        reached = EngineSleepState()
        for method, (argument,) in rest.verbs():
            reached = reached.deeper(argument) if method == "sleep" else reached.without(argument)
        assert reached == rest
        assert rest.without(TAGS) == EngineSleepState()


@pytest.mark.parametrize("mode", MODES)
def test_the_synchronous_engine_sleeps(mode: str) -> None:
    whole = WholeEngine(max_num_seqs=4, max_num_batched_tokens=16)
    expected = alone([1, 2, 3] * 10, params(12))
    whole.add("a", [1, 2, 3] * 10, params(12))
    for _ in range(5):
        whole.step()
    whole.engine.sleep(1, mode)
    with pytest.raises(UnavailableError, match="sleeps"):
        whole.engine.add_request("b", [1], params())
    if mode == "keep":
        with pytest.raises(ConflictError, match="wake_up"):
            whole.step()
    whole.engine.wake_up()
    whole.drain(max_steps=100)
    check_result(whole.result("a"), expected, disturbed=mode == "abort")


@pytest.mark.more
@pytest.mark.item(54)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), overlapped=st.booleans(), swap=st.booleans(), window=st.sampled_from([None, 8]))
def test_sleeping_at_any_time_changes_no_token(
    data: st.DataObject, overlapped: bool, swap: bool, window: int | None
) -> None:
    args: dict[str, Any] = {"async_scheduling": overlapped, "num_gpu_blocks_override": 20, "block_size": 4}
    if swap:
        args |= {"swap_space": 2**-16, "preemption_mode": "swap"}
    whole = WholeEngine(max_num_seqs=3, max_num_batched_tokens=8, window=window, max_model_len=40, **args)
    expected = {}
    for i in range(data.draw(st.integers(1, 4))):
        prompt = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=16))
        sampling = params(data.draw(st.integers(1, 12)), n=data.draw(st.integers(1, 2)))
        expected[f"{i}"] = alone(prompt, sampling)
        whole.add(f"{i}", prompt, sampling)
    while whole.engine.has_unfinished_requests():
        for _ in range(data.draw(st.integers(1, 6))):
            whole.step()
        if not whole.engine.has_unfinished_requests():
            break
        whole.engine.sleep(data.draw(st.sampled_from(list(LEVELS))), "keep")
        whole.core.scheduler.check_integrity()
        whole.engine.wake_up()
        if data.draw(st.booleans()):
            whole.drain(max_steps=500)
    whole.drain(max_steps=10)
    for name, result in expected.items():
        check_result(whole.result(name), result, disturbed=False)


def test_a_run_that_slept_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    whole = WholeEngine(max_num_seqs=2, max_num_batched_tokens=16, record_trace=str(file))
    for name in "abc":
        whole.add(name, [1, 2, 3] * 10, params(12))
    for level in LEVELS:
        for _ in range(3):
            whole.step()
        whole.engine.sleep(level, "keep")
        whole.engine.wake_up()
    whole.drain(max_steps=100)
    whole.engine.shutdown()
    assert len(list(replay(read_trace(file)))) > 10


def test_the_wait_is_explained() -> None:
    whole = WholeEngine(max_num_seqs=1, max_num_batched_tokens=16)
    for name in "ab":
        whole.add(name, [1, 2, 3], params(8))
    whole.step()
    whole.engine.sleep(1, "keep")
    causes = [whole.engine.explain(name)[0].cause for name in "ab"]
    assert causes == ["asleep", "asleep"]
    whole.engine.wake_up()
    assert "preempted by the engine's sleep" in str(whole.engine.explain("a")[0])
    whole.drain(max_steps=100)
