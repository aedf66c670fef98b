# SPDX-License-Identifier: Apache-2.0
"""Replicas in processes of their own: one engine, whichever computes and whichever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.client import ProcessClient
from quire.engine.cores import OwnCores
from quire.engine.startup import prepare
from quire.entrypoints.llm import LLM
from quire.errors import EngineError, StartupError
from quire.sampling_params import SamplingParams
from tests.engine.slow_schedulers import POISON, Poisoned
from tests.engine.test_restart import collect, expected, params, run_all, started


def pid_of(engine: AsyncLLM, core: int) -> int:
    client = engine._clients[core]
    assert isinstance(client, ProcessClient)
    return client.process.pid


def disturbing(engine: AsyncLLM, how: Callable[[], None]) -> Callable[[], None]:
    """Something that is done while both replicas have work."""

    def disturb() -> None:
        assert all(engine._front_end.in_flight(core) for core in range(2))
        how()

    return disturb


async def all_up(engine: AsyncLLM) -> None:
    async with asyncio.timeout(60):
        while engine._front_end.core_ready is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_killed_replica_fails_no_request_and_others_serve(
    null_model_dir: Path,
) -> None:
    stop, results = await expected(null_model_dir, enable_prefix_caching=False)
    engine = await started(null_model_dir, enable_prefix_caching=False, data_parallel_size=2)
    first = pid_of(engine, 0)
    was_ready: list[bool] = []

    def kill() -> None:
        assert all(engine._front_end.in_flight(core) for core in range(2))
        os.kill(first, signal.SIGKILL)

    async def watch() -> None:
        while True:
            was_ready.append(engine.is_ready)
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    try:
        assert await run_all(engine, stop, kill) == results
        await all_up(engine)
        assert pid_of(engine, 0) != first
        assert all(was_ready)
        assert await run_all(engine, stop, lambda: None) == results
        await check_verbs(engine)
    finally:
        watching.cancel()
        await engine.shutdown()


async def check_verbs(engine: AsyncLLM) -> None:
    """Check that utility calls of the engine reach all of its cores."""
    assert [stats.num_running for stats in await engine.check_integrity()] == [0, 0]
    assert await engine.reset_prefix_cache()
    kept = asyncio.gather(*(collect(engine, [core], params(), f"r{core}") for core in range(4)))
    while engine.num_unfinished_requests() < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await engine.sleep(1, "keep")
    assert engine.asleep == ["kv_cache", "scheduling", "weights"]
    await engine.wake_up()
    assert [len(one.outputs[0].token_ids) for one in await kept] == [60] * 4
    assert len(await engine.explain("r3")) == 1


@pytest.mark.more
async def test_request_that_kills_two_replicas_fails_others_continue(null_model_dir: Path) -> None:
    """Requests in work with the poisoned one in both deaths fail too; those on the second replica continue."""
    engine = await started(null_model_dir, Poisoned, data_parallel_size=2)
    try:
        alone = await collect(engine, [1, 2], params())
        work = [asyncio.create_task(collect(engine, [1, 2], params())) for _ in range(4)]
        while engine.num_unfinished_requests() < len(work):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert [len(engine._front_end.in_flight(core)) for core in range(2)] == [2, 2]
        with pytest.raises(EngineError, match="died twice while it worked on this request"):
            await collect(engine, [POISON, 1], params())
        results = await asyncio.gather(*work, return_exceptions=True)
        whole = [one.outputs for one in results if not isinstance(one, BaseException)]
        assert len(whole) >= 2
        assert whole == [alone.outputs] * len(whole)
        assert all(isinstance(one, EngineError) for one in results if isinstance(one, BaseException))
        await all_up(engine)
        assert engine.is_ready
    finally:
        await engine.shutdown()


async def test_a_replica_that_cannot_start_is_named(null_model_dir: Path) -> None:
    args = {"model": str(null_model_dir), "distributed_executor_backend": "null", "data_parallel_size": 2}
    cores = OwnCores(prepare(EngineConfig.from_args(**args), "server"), in_process=True)
    with pytest.raises(StartupError, match=r"^replica 1: no memory$"):
        cores.lost(1, {}, set(), StartupError("no memory"), was_ready=False)


PROMPTS = ["The capital of France is", "Once upon a time", "2 + 2 =", "The capital of France is", "Hello"]


def generated(**args: Any) -> list[Any]:
    """Tokens and logprobs of a few prompts, offline."""
    sampling = SamplingParams(max_tokens=12, logprobs=3, seed=7, temperature=0.9)
    llm = LLM(max_model_len=256, max_num_seqs=4, num_gpu_blocks_override=100, **args)
    assert len(llm.llm_engine._clients) == args.get("data_parallel_size", 1)
    outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    llm.llm_engine.shutdown()
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


@pytest.mark.more
def test_offline_replicas_give_the_bits_of_one() -> None:
    assert generated(data_parallel_size=2) == generated()


@pytest.mark.more
def test_replicas_of_two_ranks_have_the_bits_of_one() -> None:
    assert generated(data_parallel_size=2, tensor_parallel_size=2) == generated(tensor_parallel_size=2)
