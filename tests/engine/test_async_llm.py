# SPDX-License-Identifier: Apache-2.0
"""Many concurrent generators: each stream ends once, disconnects free all resources, a core's death reaches all."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.errors import EngineDeadError, StartupError, ValidationError
from quire.metrics.stats import IterationStats, StatLogger
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.output import SchedulerStats
from tests.fixtures.quick import quick


def make_engine(model_dir: Path, *, in_process: bool = True, **args: Any) -> AsyncLLM:
    defaults: dict[str, Any] = {
        "num_gpu_blocks_override": 65,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    }
    args = {"model": str(model_dir), "distributed_executor_backend": "null", **defaults, **args}
    return AsyncLLM(EngineConfig.from_args(**args), in_process=in_process)


KINDS = "in process", "in process, rounds", "own process", "own process, overlapped", "own process, rounds"


@pytest.fixture(params=quick(KINDS, ["in process"]))
async def engine(request: pytest.FixtureRequest, null_model_dir: Path) -> AsyncIterator[AsyncLLM]:
    in_process, overlapped = request.param.startswith("in process"), request.param.endswith("overlapped")
    rounds = 5 if request.param.endswith("rounds") else 1
    args = {"async_scheduling": overlapped, "num_scheduler_steps": rounds}
    engine = make_engine(null_model_dir, in_process=in_process, **args)
    await engine.wait_ready()
    yield engine
    await engine.shutdown()


def params(**values: Any) -> SamplingParams:
    defaults = {
        "temperature": 0.0,
        "max_tokens": 12,
        "ignore_eos": True,
        "output_kind": RequestOutputKind.DELTA,
    }
    return SamplingParams(**(defaults | values))


async def collect(
    engine: AsyncLLM, prompt: list[int], sampling: SamplingParams, label: str = "r"
) -> list[int]:
    token_ids: list[int] = []
    num_final = 0
    async for output in engine.generate(prompt, sampling, label):
        token_ids += output.outputs[0].token_ids
        num_final += output.finished
    assert num_final == 1
    return token_ids


async def test_the_times_of_a_request_are_those_of_all_its_sequences(engine: AsyncLLM) -> None:
    outputs = [output async for output in engine.generate([1, 2, 3], params(n=3, max_tokens=5), "r")]
    times = outputs[-1].metrics
    assert 0 < times.arrival_time <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert times.num_generation_tokens == 15


async def assert_all_blocks_free(engine: AsyncLLM) -> None:
    # The core handles messages in order, so aborts sent before this call have taken effect when it answers.
    await engine.call_core("check_integrity")
    stats = await engine.call_core("stats")
    assert stats.get("num_waiting", 0) == stats.get("kv_cache_usage", 0) == 0
    assert engine.num_unfinished_requests() == 0


@pytest.mark.parametrize("engine", quick(KINDS, ["in process", "own process"]), indirect=True)
async def test_200_streams_with_disconnects(engine: AsyncLLM) -> None:
    rng = random.Random(0)

    async def client(number: int) -> str:
        prompt = [rng.randrange(200) for _ in range(rng.randrange(1, 60))]
        sampling = params(max_tokens=rng.randrange(1, 40))
        if number % 5:
            assert len(await collect(engine, prompt, sampling, label="same")) == sampling.max_tokens
            return "finished"
        stream = engine.generate(prompt, sampling, "same")
        for _ in range(rng.randrange(3)):
            await anext(stream, None)
        await stream.aclose()
        return "gone"

    results = await asyncio.gather(*(client(number) for number in range(200)))
    assert (results.count("finished"), results.count("gone")) == (160, 40)
    await assert_all_blocks_free(engine)


async def test_cancelling_the_task_aborts(engine: AsyncLLM) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in engine.generate([1, 2, 3], params(max_tokens=120), "r"):
            started.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_all_blocks_free(engine)


async def test_abort_by_label_ends_every_request_of_it(engine: AsyncLLM) -> None:
    async def reason() -> str | None:
        async for output in engine.generate([1, 2], params(max_tokens=120), "label"):
            last = output.outputs[0].finish_reason
        return last

    tasks = [asyncio.create_task(reason()) for _ in range(20)]
    await asyncio.sleep(0)
    await engine.abort(["label", "unknown"])
    assert {await task for task in tasks} <= {"abort", "length"}
    assert "abort" in {task.result() for task in tasks}
    await assert_all_blocks_free(engine)


async def test_a_bad_prompt_fails_before_the_first_output_and_alone(engine: AsyncLLM) -> None:
    good = asyncio.create_task(collect(engine, [1, 2, 3], params()))
    with pytest.raises(ValidationError):
        await collect(engine, [10**9], params())
    with pytest.raises(ValidationError, match="logprobs"):
        await collect(engine, [1], params(logprobs=500))
    assert len(await good) == 12


async def test_a_slow_reader_gets_the_same_text(engine: AsyncLLM) -> None:
    fast = await collect(engine, [1, 2, 3], params(max_tokens=50))
    slow: list[int] = []
    async for output in engine.generate([1, 2, 3], params(max_tokens=50), "slow"):
        slow += output.outputs[0].token_ids
        await asyncio.sleep(0.002)
    assert slow == fast


async def test_statistics_reach_the_loggers(engine: AsyncLLM) -> None:
    class Recorder(StatLogger):
        def __init__(self) -> None:
            self.steps: list[IterationStats] = []

        def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
            assert scheduler is not None or iteration.finished
            self.steps.append(iteration)

    recorder = Recorder()
    engine.add_stat_logger(recorder)
    await collect(engine, [1, 2, 3], params())
    assert sum(step.num_generation_tokens for step in recorder.steps) == 12
    assert sum(len(step.time_to_first_token_s) for step in recorder.steps) == 1
    assert sum(len(step.inter_token_s) for step in recorder.steps) == 11
    (finished,) = [entry for step in recorder.steps for entry in step.finished]
    assert (finished.num_prompt_tokens, finished.finish_reason) == (3, "length")
    assert finished.e2e_s >= finished.prefill_s + finished.decode_s
    request = engine.generate([1, 2, 3], params(max_tokens=120), "gone").__anext__()
    # Runs until it waits for an output, and is then cancelled without giving the loop a turn to deliver one.
    request.send(None)  # type: ignore[attr-defined]
    with pytest.raises(asyncio.CancelledError):
        request.throw(asyncio.CancelledError())  # type: ignore[attr-defined]
    last = [entry for step in recorder.steps for entry in step.finished][-1]
    assert last.finish_reason == "abort", "a request whose caller left is counted"


async def test_utilities(engine: AsyncLLM) -> None:
    assert await engine.reset_prefix_cache()
    with pytest.raises(Exception, match="no utility"):
        await engine.call_core("nope")


async def test_core_that_cannot_start_names_its_reason(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir, in_process=False, num_gpu_blocks_override=8)
    with pytest.raises(StartupError, match="needs 8 KV cache blocks"):
        await engine.wait_ready()
    await engine.shutdown()


async def test_shutdown_ends_requests_in_flight(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir)
    await engine.wait_ready()
    task = asyncio.create_task(collect(engine, [1, 2, 3], params(max_tokens=124)))
    await asyncio.sleep(0)
    await engine.shutdown()
    with pytest.raises(EngineDeadError):
        await task


def test_the_front_end_imports_no_torch() -> None:
    code = "import sys, quire.engine.async_llm; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("error", [EngineDeadError("gone"), StartupError("no memory")])
async def test_core_death_during_tokenization_fails_the_request(
    error: Exception, null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(null_model_dir)
    await engine.wait_ready()
    tokenizing, go_on = threading.Event(), threading.Event()
    tokenize = engine.input_processor.tokenize

    def slow(*args: Any, **kwargs: Any) -> Any:
        tokenizing.set()
        assert go_on.wait(60)
        return tokenize(*args, **kwargs)

    monkeypatch.setattr("quire.engine.tokenizer.INLINE_CHARS", 0)
    monkeypatch.setattr(engine.input_processor, "tokenize", slow)
    request = asyncio.ensure_future(anext(engine.generate("the quick fox", params(), "r")))
    await asyncio.to_thread(tokenizing.wait)
    engine._die(error)  # type: ignore[arg-type]
    go_on.set()
    with pytest.raises(type(error), match=str(error)):
        await asyncio.wait_for(request, 10)
    await engine.shutdown()


async def test_deadline_is_kept_while_the_core_is_silent(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir, in_process=False)
    await engine.wait_ready()
    process = engine._clients[0].process  # type: ignore[attr-defined]
    process.send_signal(signal.SIGSTOP)
    try:
        first = engine.generate([1, 2], params(), "first", timeout_s=0.05)
        second = engine.generate([1, 2], params(), "second", timeout_s=0.01)
        ends = await asyncio.wait_for(asyncio.gather(anext(first), anext(second)), 10)
        assert [end.outputs[0].finish_reason for end in ends] == ["timeout", "timeout"]
        assert engine.num_unfinished_requests() == 0
    finally:
        process.send_signal(signal.SIGCONT)
    assert len(await collect(engine, [1, 2], params())) == 12
    await assert_all_blocks_free(engine)
    await engine.shutdown()


async def test_time_runs_while_a_prompt_is_tokenized(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize = engine._tokenize

    async def slowly(*args: Any) -> Any:
        await asyncio.sleep(0.1)
        return await tokenize(*args)

    monkeypatch.setattr(engine, "_tokenize", slowly)
    outputs = [output async for output in engine.generate([1, 2], params(), "late", timeout_s=0.05)]
    assert outputs[-1].outputs[0].finish_reason == "timeout"
    assert not outputs[-1].outputs[0].token_ids


async def test_two_cores_match_one_core(engine: AsyncLLM, null_model_dir: Path) -> None:
    args = {"model": str(null_model_dir), "distributed_executor_backend": "null", "data_parallel_size": 2}
    two = AsyncLLM(EngineConfig.from_args(**args), in_process=True)
    await two.wait_ready()
    prompts = [[index, 3] for index in range(6)]
    together = await asyncio.gather(*(collect(two, prompt, params(seed=1)) for prompt in prompts))
    assert together == [await collect(engine, prompt, params(seed=1)) for prompt in prompts]
    assert await two.reset_prefix_cache()
    await two.shutdown()


@pytest.mark.item(53)
async def test_a_clock_that_jumps_changes_nothing(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By years, in either direction, while requests with and without deadlines run."""
    rng = random.Random(3)
    monkeypatch.setattr(time, "time", lambda: rng.choice([0.0, 1.8e9, 4e9]) + rng.random())
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    config = EngineConfig.from_args(model=str(null_model_dir), distributed_executor_backend="null")
    engine = AsyncLLM(config, in_process=True)
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)

    async def one(number: int) -> tuple[list[int], str | None]:
        timeout_s = [None, 3600.0][number % 2]
        async for output in engine.generate([1, 2, 3], params, f"r{number}", timeout_s=timeout_s):
            last = output.outputs[0]
        assert output.metrics is not None
        assert 0 <= output.metrics.last_token_ts - output.metrics.arrival_time < 60
        return last.token_ids, last.finish_reason

    results = await asyncio.gather(*(one(number) for number in range(20)))
    assert all(result == results[0] for result in results)
    assert results[0][1] == "length"
    await engine.shutdown()
