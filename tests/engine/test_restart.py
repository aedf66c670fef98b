# SPDX-License-Identifier: Apache-2.0
"""A core process dies or hangs: requests resume in the next one, and clients see a pause only."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.client import ProcessClient, message_socket
from quire.engine.messages import EngineCoreOutputs, UtilityResult
from quire.errors import EngineDeadError, EngineError, UnavailableError
from quire.metrics.prometheus import PrometheusStatLogger
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.output import RequestUpdate
from quire.scheduler.scheduler import Scheduler
from tests.engine.slow_schedulers import POISON, Poisoned, Slow, Spinning, hold_cores, release_cores
from tests.fixtures.quick import quick


async def started(
    model: Path, scheduler: type[Scheduler] = Slow, *, in_process: bool = False, **args: Any
) -> AsyncLLM:
    fixed: dict[str, Any] = {
        "distributed_executor_backend": "null",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    }
    name = f"{scheduler.__module__}:{scheduler.__name__}"
    config = EngineConfig.from_args(model=str(model), scheduler_cls=name, **fixed | args)
    engine = AsyncLLM(config, in_process=in_process)
    await engine.wait_ready()
    return engine


def process_of(engine: AsyncLLM) -> Any:
    (client,) = engine._clients
    assert isinstance(client, ProcessClient)
    return client.process


async def collect(
    engine: AsyncLLM,
    prompt: Any,
    sampling: SamplingParams,
    label: str = "r",
    on_output: Callable[[], None] = lambda: None,
) -> RequestOutput:
    """All outputs, joined."""
    whole: RequestOutput | None = None
    async for output in engine.generate(prompt, sampling, label):
        on_output()
        if whole is None or sampling.output_kind is not RequestOutputKind.DELTA:
            whole = output
        else:
            whole.add(output)
    assert whole is not None
    return whole


def params(**values: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 60, "ignore_eos": True, "seed": 5, "output_kind": RequestOutputKind.DELTA} | values
    )


REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([1, 2, 3], {"temperature": 0.0, "logprobs": 2}),
    ([3, 1, 4, 1, 5], {"n": 3, "seed": 4, "logprobs": 1}),
    ([3, 1, 4], {"n": 2, "seed": 7, "output_kind": RequestOutputKind.FINAL_ONLY}),
    ([2, 7] * 20, {"seed": 9, "prompt_logprobs": 1, "output_kind": RequestOutputKind.CUMULATIVE}),
    ([2, 7] * 5, {"seed": 1, "presence_penalty": 1.5, "repetition_penalty": 1.3, "temperature": 0.8}),
    ([8] * 3, {"seed": 2, "min_tokens": 50, "stop_token_ids": list(range(100))}),
]


async def run_all(engine: AsyncLLM, stop: str | None, disturb: Callable[[], None]) -> list[Any]:
    """Return each request's result as a client sees it; `disturb` is called once all of them have begun.

    No request ends before that: cores with a `Slow` scheduler are held.
    """
    hold_cores()
    begun: set[int] = set()
    whole = len([one for one in REQUESTS if one[1].get("output_kind") is RequestOutputKind.FINAL_ONLY])
    is_disturbed = False

    def on_output(index: int) -> None:
        nonlocal is_disturbed
        begun.add(index)
        if len(begun) == len(REQUESTS) - whole and not is_disturbed:
            is_disturbed = True
            try:
                disturb()
            finally:
                release_cores()

    async def one(index: int) -> Any:
        prompt, values = REQUESTS[index]
        values = {**values, "stop": stop} if index == 0 and stop else values
        output = await collect(engine, prompt, params(**values), f"r{index}", lambda: on_output(index))
        completions = sorted(output.outputs, key=lambda completion: completion.index)
        assert output.metrics is not None
        counted = output.num_cached_tokens, output.metrics.num_generation_tokens
        return completions, output.prompt_logprobs, output.prompt_token_ids, counted

    results = await asyncio.gather(*(one(index) for index in range(len(REQUESTS))))
    assert is_disturbed
    return results


async def expected(model: Path, **args: Any) -> tuple[str, list[Any]]:
    """A stop string that occurs late, and the results of an engine that is left alone."""
    engine = await started(model, in_process=True, **args)
    text = (await run_all(engine, None, lambda: None))[0][0][0].text
    stop = text[-12:-8]
    results = await run_all(engine, stop, lambda: None)
    assert results[0][0][0].stop_reason == stop
    await engine.shutdown()
    return stop, results


@pytest.mark.parametrize("backend", ["null", pytest.param("tiny", marks=pytest.mark.more)])
async def test_a_killed_core_costs_a_pause_and_nothing_else(
    backend: str, null_model_dir: Path, tiny_model: Callable[[str], Path]
) -> None:
    model, args = null_model_dir, dict[str, Any]()
    if backend == "tiny":
        model, args = tiny_model("llama"), {"distributed_executor_backend": "uni", "max_model_len": 128}
        args["num_gpu_blocks_override"] = 200
    stop, results = await expected(model, enable_prefix_caching=False, **args)
    engine = await started(model, enable_prefix_caching=False, **args)
    first = process_of(engine)
    assert await run_all(engine, stop, first.kill) == results
    assert process_of(engine) is not first
    assert engine.is_ready
    assert not engine.errored
    await engine.call_core("check_integrity")
    assert engine.num_unfinished_requests() == (await engine.call_core("stats")).get("num_running", 0) == 0
    await engine.shutdown()


@pytest.mark.more
@pytest.mark.item(44)
async def test_a_stopped_core_is_killed_and_replaced(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, results = await expected(null_model_dir)
    engine = await started(null_model_dir, core_heartbeat_timeout=3.0)
    monkeypatch.setattr("quire.supervision.progress.STALL_S", 0.5)
    first = process_of(engine)
    streams = asyncio.create_task(run_all(engine, stop, lambda: first.send_signal(signal.SIGSTOP)))
    async with asyncio.timeout(60):
        while engine.is_ready:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert first.poll() is None, "a core that does not answer is not ready before it is given up"
    assert [result[0] for result in await streams] == [result[0] for result in results]
    assert first.returncode == -signal.SIGKILL
    await engine.shutdown()


@pytest.mark.item(44)
async def test_spinning_core_is_found_by_its_expected_step_time(null_model_dir: Path) -> None:
    """Not after the 20 timeouts that a step may take of which nothing is known."""
    engine = await started(null_model_dir, Spinning, core_heartbeat_timeout=3.0, on_core_death="error")
    first = process_of(engine)
    await collect(engine, [1], params())
    async with asyncio.timeout(50):
        with pytest.raises(UnavailableError):
            await collect(engine, [POISON], params())
    assert first.returncode == -signal.SIGKILL
    await engine.shutdown()


@pytest.mark.item(47)
async def test_request_that_kills_two_cores_fails_and_others_continue(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.supervision.progress.BACKOFF_S", (0.0, 0.0, 0.0))
    alone = await started(null_model_dir, in_process=True)
    wanted = [(await collect(alone, [index, 5], params())).outputs for index in range(3)]
    await alone.shutdown()
    engine = await started(null_model_dir, Poisoned, max_num_seqs=1)
    poison = asyncio.create_task(collect(engine, [POISON, 1], params()))
    await asyncio.sleep(0)
    others = [asyncio.create_task(collect(engine, [index, 5], params())) for index in range(3)]
    with pytest.raises(EngineError, match="died twice while it worked on this request"):
        await poison
    assert [(await other).outputs for other in others] == wanted
    await engine.shutdown()


@pytest.mark.more
@pytest.mark.item(36)
async def test_requests_may_join_or_leave_while_no_core_runs(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await started(null_model_dir)
    monkeypatch.setattr("quire.supervision.progress.BACKOFF_S", (0.3, 0.3, 0.3))
    expected_ids = (await collect(engine, [1, 2], params())).outputs[0].token_ids
    process_of(engine).send_signal(signal.SIGSTOP)
    leaves = asyncio.create_task(collect(engine, [1, 2], params()))
    stats = asyncio.create_task(engine.call_core("stats"))
    await asyncio.sleep(0)
    process_of(engine).kill()
    async with asyncio.timeout(300):
        while engine.is_ready:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    joins = asyncio.create_task(collect(engine, [1, 2], params()))
    late = asyncio.create_task(anext(engine.generate([1, 2], params(), "late", timeout_s=0.01)))
    await asyncio.sleep(0)
    leaves.cancel()
    assert (await joins).outputs[0].token_ids == expected_ids
    assert (await late).outputs[0].finish_reason == "timeout"
    assert await stats, "a call is asked again of the new core"
    assert engine.is_ready
    await engine.shutdown()


async def test_core_without_resumption_is_replaced_and_requests_fail(null_model_dir: Path) -> None:
    engine = await started(null_model_dir, on_core_death="error")
    process_of(engine).send_signal(signal.SIGSTOP)
    tasks = [asyncio.create_task(collect(engine, [1, 2, 3], params())) for _ in range(20)]
    await asyncio.sleep(0)
    process_of(engine).kill()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, UnavailableError) for result in results)
    assert not engine.errored
    assert not engine.is_ready
    assert len((await collect(engine, [1], params())).outputs[0].token_ids) == 60
    await engine.shutdown()


@pytest.mark.more
@pytest.mark.item(43)
async def test_the_fourth_death_is_the_engines(null_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.supervision.progress.BACKOFF_S", (0.0, 0.0, 0.0))
    engine = await started(null_model_dir, max_num_seqs=1)
    for _ in range(3):
        dead = process_of(engine)
        dead.kill()
        assert len((await collect(engine, [1], params())).outputs[0].token_ids) == 60
        assert process_of(engine) is not dead
    process_of(engine).kill()
    with pytest.raises(EngineDeadError, match=r"killed by signal 9.*4th death in 10 minutes"):
        await collect(engine, [1], params())
    assert engine.errored
    await engine.shutdown()


async def test_a_core_that_cannot_be_started_again_is_a_death(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.supervision.progress.BACKOFF_S", (0.0, 0.0, 0.0))
    engine = await started(null_model_dir)

    def refuse(self: ProcessClient, config: EngineConfig) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(ProcessClient, "_start_core", refuse)
    process_of(engine).kill()
    with pytest.raises(EngineDeadError, match="no more processes"):
        await collect(engine, [1], params())
    await engine.shutdown()


@pytest.mark.more
async def test_shutdown_during_a_core_restart_leaves_nothing(
    null_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for num_turns in (0, 20):
        engine = await started(null_model_dir)
        process_of(engine).kill()
        async with asyncio.timeout(300):
            while engine.is_ready:  # noqa: ASYNC110
                await asyncio.sleep(0)
        for _ in range(num_turns):
            await asyncio.sleep(0.001)
        await engine.shutdown()
        assert process_of(engine).returncode is not None
        assert not os.listdir(tmp_path)


@pytest.mark.item(51)
async def test_garbage_on_the_socket_costs_a_line_in_the_log(
    null_model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = await started(null_model_dir)
    (client,) = engine._clients
    assert isinstance(client, ProcessClient)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{client._directory / 'requests'}")
        for frame in (b"", b"\xc1", b"\x81\xa4type\xa3add", bytes(10**6)):
            socket.send(frame)
    assert len((await collect(engine, [1], params())).outputs[0].token_ids) == 60
    await engine.shutdown()
    assert capfd.readouterr().err.count("is not a message of a front end") >= 1


@pytest.mark.item(51)
async def test_garbage_to_the_front_end_costs_a_line_in_the_log(
    null_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that nobody asked for, and an update of no request, too."""
    engine = await started(null_model_dir)
    (client,) = engine._clients
    assert isinstance(client, ProcessClient)
    first = client.process
    stray = [UtilityResult(77), EngineCoreOutputs([RequestUpdate("nobody's", [1], "stop")])]
    frames = [b"", b"\xc1", b"\x81\xa4type\xa5ready", bytes(10**6), *map(msgspec.msgpack.encode, stray)]
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{client._directory / message_socket(0)}")
        for frame in frames:
            socket.send(frame)
    assert len((await collect(engine, [1], params())).outputs[0].token_ids) == 60
    async with asyncio.timeout(300):
        while "answers call 77" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert len((await collect(engine, [1], params())).outputs[0].token_ids) == 60
    assert process_of(engine) is first
    assert caplog.text.count("is not a message of a core") == 4
    await engine.shutdown()


async def test_signals_for_the_whole_group_leave_the_core_alone(null_model_dir: Path) -> None:
    engine = await started(null_model_dir)
    first = process_of(engine)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        first.send_signal(number)
    assert len((await collect(engine, [1], params())).outputs[0].token_ids) == 60
    assert process_of(engine) is first
    await engine.shutdown()


@pytest.mark.parametrize(
    ("policy", "resumed", "failed"), quick([("resume", 2, 0), ("error", 0, 2)], [("error", 0, 2)])
)
async def test_death_is_counted_with_the_fate_of_requests(
    null_model_dir: Path, policy: str, resumed: int, failed: int
) -> None:
    engine = await started(null_model_dir, on_core_death=policy)
    registry = CollectorRegistry()
    engine.add_stat_logger(PrometheusStatLogger("m", 64, registry=registry))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"quire:{name}", {"model_name": "m", "engine": "0", **labels})

    try:
        assert value("engine_core_up") == 1, "who joins late is told what is ready"
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        running = [asyncio.create_task(collect(engine, [3, index], sampling)) for index in range(2)]
        async with asyncio.timeout(60):
            while (value("generation_tokens_total") or 0) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        process_of(engine).kill()
        await asyncio.gather(*running, return_exceptions=True)
        async with asyncio.timeout(60):
            while not engine.is_ready:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert value("engine_core_deaths_total") == value("engine_core_up") == 1
        assert value("engine_core_resumed_requests_total") == resumed
        assert value("engine_core_failed_requests_total") == failed
        assert value("request_success_total", finished_reason="error") == failed
        assert value("request_success_total", finished_reason="length") == resumed
        if resumed:
            assert value("generation_tokens_total") == 80, "what was there before is not counted again"
            assert value("prompt_tokens_total") == 4
    finally:
        await engine.shutdown()
