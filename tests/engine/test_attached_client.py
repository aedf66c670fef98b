# SPDX-License-Identifier: Apache-2.0
"""Several front ends of one core: each gets its own outputs and notices, also when the core or another one ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.engine.async_llm import AsyncLLM
from quire.engine.client import CoreAddress
from quire.engine.cores import BorrowedCores
from quire.engine.shared_counters import SharedCounters
from quire.errors import EngineDeadError, EngineError, UnavailableError
from quire.metrics.stats import IterationStats, StatLogger
from quire.scheduler.output import SchedulerStats
from tests.engine.slow_schedulers import POISON, Poisoned
from tests.engine.test_restart import collect, params, process_of, started

PROMPTS = [[1, 2, 3], [3, 1, 4, 1, 5], [2, 7] * 20, [8] * 3]


class Lending:
    """Tells every borrower where the core is, as the first API process does."""

    def __init__(self) -> None:
        self.borrowers: list[BorrowedCores] = []
        self.addresses: list[CoreAddress] = []
        self.cores: dict[int, CoreAddress] = {}

    def core_started(self, core: int, address: CoreAddress) -> None:
        self.addresses.append(address)
        self.cores[core] = address
        for borrower in self.borrowers:
            borrower.core_started(core, address)

    def core_lost(self, core: int) -> None:
        for borrower in self.borrowers:
            borrower.core_lost(core)


@asynccontextmanager
async def front_ends(
    model: Path, num_others: int, scheduler: Any = None, **args: Any
) -> AsyncIterator[tuple[AsyncLLM, list[AsyncLLM]]]:
    """An engine that owns its core, and others that share it."""
    owner = await started(model, **({"scheduler": scheduler} if scheduler else {}), **args)
    lending = Lending()
    owner.watch_cores(lending)
    others = [await joined(owner, lending, number) for number in range(1, num_others + 1)]
    try:
        yield owner, others
    finally:
        for engine in (*others, owner):
            await engine.shutdown()


async def joined(owner: AsyncLLM, lending: Lending, number: int) -> AsyncLLM:
    cores = BorrowedCores(owner.config, number)
    lending.borrowers.append(cores)
    for core, address in lending.cores.items():
        cores.core_started(core, address)
    engine = AsyncLLM(owner.config, cores=cores)
    await engine.wait_ready()
    return engine


async def tokens(engine: AsyncLLM, prompt: list[int], label: str = "r", **values: Any) -> list[list[int]]:
    output = await collect(engine, prompt, params(**values), label)
    return [one.token_ids for one in sorted(output.outputs, key=lambda one: one.index)]


async def begun(engine: AsyncLLM, num: int) -> None:
    async with asyncio.timeout(60):
        while engine.num_unfinished_requests() < num:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def running(engine: AsyncLLM) -> int:
    stats = await engine.call_core("stats")
    return int(stats.get("num_running", 0)) + int(stats.get("num_waiting", 0))


async def test_equal_labels_at_front_ends_are_distinct_requests(null_model_dir: Path) -> None:
    async with front_ends(null_model_dir, 2) as (owner, others):
        alone = [await tokens(owner, prompt, n=2) for prompt in PROMPTS]
        engines = [owner, *others]
        together = await asyncio.gather(
            *(tokens(engine, prompt, "same", n=2) for prompt in PROMPTS for engine in engines)
        )
        assert together == [wanted for wanted in alone for _ in engines]
        assert await running(others[0]) == 0


@pytest.mark.more
async def test_front_ends_use_all_replicas_and_lose_nothing_with_one(null_model_dir: Path) -> None:
    async with front_ends(null_model_dir, 1, data_parallel_size=2) as (owner, (other,)):
        ledger = SharedCounters(2, num_cores=2)
        for index, engine in enumerate((owner, other)):
            engine.share(ledger.slot(index))
        alone = [await tokens(owner, prompt, n=2) for prompt in PROMPTS]
        tasks = [asyncio.create_task(tokens(one, p, n=2)) for p in PROMPTS for one in (owner, other)]
        await begun(owner, 2 * len(PROMPTS))
        await begun(other, 2 * len(PROMPTS))
        used = [core for core in range(2) for engine in (owner, other) if engine._front_end.in_flight(core)]
        assert {*used} == {0, 1}, "each front end sees where the other's requests went"
        os.kill(owner._clients[1].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert await asyncio.gather(*tasks) == [wanted for wanted in alone for _ in range(2)]
        assert await tokens(other, PROMPTS[0], n=2) == alone[0]


async def test_front_end_lists_its_requests_and_the_core_all(null_model_dir: Path) -> None:
    async with front_ends(null_model_dir, 1) as (owner, (other,)):
        tasks = [asyncio.create_task(tokens(engine, [1, 2], "r")) for engine in (owner, other)]
        await begun(owner, 1)
        await begun(other, 1)
        assert (owner.labels(), other.labels()) == (["r"], ["r"])
        (mine,), (theirs,) = await owner.explain("r"), await other.explain("r")
        assert mine.request_id != theirs.request_id
        assert not await other.reset_prefix_cache()
        await other.abort("r")
        assert len((await tasks[0])[0]) == 60
        assert len((await tasks[1])[0]) < 60


async def test_statistics_are_sent_to_one_front_end(null_model_dir: Path) -> None:
    class Seen(StatLogger):
        def __init__(self) -> None:
            self.num_tokens = 0
            self.stats: list[SchedulerStats] = []

        def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
            self.num_tokens += iteration.num_generation_tokens
            self.stats += [scheduler] if scheduler is not None else []

    async with front_ends(null_model_dir, 1) as (owner, (other,)):
        first, second = Seen(), Seen()
        owner.add_stat_logger(first)
        other.add_stat_logger(second)
        await tokens(other, [1, 2])
        async with asyncio.timeout(300):
            while not first.stats or first.stats[-1].num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (first.num_tokens, second.num_tokens, second.stats) == (0, 60, [])


@pytest.mark.more
@pytest.mark.parametrize("num_deaths", [1, pytest.param(2, marks=pytest.mark.more)])
async def test_a_killed_core_is_a_pause_for_every_front_end(
    num_deaths: int, null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.supervision.progress.BACKOFF_S", (0.0, 0.1, 0.1))
    args: dict[str, Any] = {"enable_prefix_caching": False}
    async with front_ends(null_model_dir, 2, **args) as (owner, others):
        engines = [owner, *others]
        alone = [await tokens(owner, prompt, max_tokens=80) for prompt in PROMPTS]
        tasks = [
            asyncio.create_task(tokens(engine, prompt, max_tokens=80))
            for prompt in PROMPTS
            for engine in engines
        ]
        calls = []
        for _ in range(num_deaths):
            await asyncio.gather(*(begun(engine, 1) for engine in engines))
            await asyncio.sleep(0.02)
            process_of(owner).kill()
            calls.append(asyncio.create_task(others[0].call_core("check_integrity")))
            async with asyncio.timeout(60):
                while others[1].is_ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                while not all(engine.is_ready for engine in engines):  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        if num_deaths == 1:
            assert await asyncio.gather(*tasks) == [wanted for wanted in alone for _ in engines]
        else:
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            wanted = [wanted for wanted in alone for _ in engines]
            assert all(
                end == whole or isinstance(end, EngineError) for end, whole in zip(ends, wanted, strict=True)
            )
        await asyncio.gather(*calls)
        assert await running(others[1]) == 0


@pytest.mark.more
async def test_request_in_work_at_two_deaths_fails_at_any_front_end(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.supervision.progress.BACKOFF_S", (0.0, 0.0, 0.0))
    async with front_ends(null_model_dir, 1, Poisoned, max_num_seqs=1) as (owner, (other,)):
        poison = asyncio.create_task(tokens(other, [POISON, 1]))
        await begun(other, 1)
        behind = [asyncio.create_task(tokens(engine, [1, 5])) for engine in (owner, other)]
        with pytest.raises(EngineError, match="died twice while it worked on this request"):
            await poison
        one, two = await asyncio.gather(*behind)
        assert one == two
        assert len(one[0]) == 60


@pytest.mark.more
async def test_without_resumption_requests_of_all_front_ends_end(null_model_dir: Path) -> None:
    async with front_ends(null_model_dir, 1, on_core_death="error") as (owner, (other,)):
        tasks = [asyncio.create_task(tokens(engine, [1])) for engine in (owner, other)]
        await begun(owner, 1)
        await begun(other, 1)
        process_of(owner).kill()
        for task in tasks:
            with pytest.raises(UnavailableError, match="send it again"):
                await task
        assert len((await tokens_when_ready(other))[0]) == 60


async def tokens_when_ready(engine: AsyncLLM) -> list[list[int]]:
    async with asyncio.timeout(60):
        while not engine.is_ready:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return await tokens(engine, [1])


async def test_requests_of_a_lost_front_end_are_aborted(null_model_dir: Path) -> None:
    async with front_ends(null_model_dir, 2) as (owner, (gone, other)):
        process_of(owner).send_signal(signal.SIGSTOP)
        lost = [asyncio.create_task(tokens(gone, [1, 2], max_tokens=100)) for _ in range(5)]
        kept = asyncio.create_task(tokens(other, [1, 2], max_tokens=100))
        await begun(gone, 5)
        await begun(other, 1)
        owner.forget(1)
        process_of(owner).send_signal(signal.SIGCONT)
        assert await running(owner) <= 1
        late = asyncio.create_task(tokens(gone, [1, 2]))  # a word that was under way
        await begun(gone, 6)
        assert len((await kept)[0]) == 100
        assert await running(owner) == 0
        assert not any(task.done() for task in (*lost, late))
        gone.end("it is gone")
        for task in (*lost, late):
            with pytest.raises(EngineDeadError):
                await task


async def test_front_end_waits_for_a_core_and_a_lost_one_is_skipped(
    null_model_dir: Path, tmp_path: Path
) -> None:
    async with front_ends(null_model_dir, 0) as (owner, _):
        lending = Lending()
        owner.watch_cores(lending)
        cores = BorrowedCores(owner.config, 1)
        engine = AsyncLLM(owner.config, cores=cores)
        waits = asyncio.create_task(engine.wait_ready())
        cores.core_started(0, CoreAddress(str(tmp_path / "nowhere"), 1))
        await asyncio.sleep(0.05)
        assert not waits.done()
        cores.core_lost(0)
        cores.core_started(0, lending.addresses[-1])
        await waits
        assert len((await tokens(engine, [1]))[0]) == 60
        await engine.shutdown()


async def test_front_end_without_a_core_can_be_shut_down(null_model_dir: Path) -> None:
    async with front_ends(null_model_dir, 0) as (owner, _):
        engine = AsyncLLM(owner.config, cores=BorrowedCores(owner.config, 1))
        waits = asyncio.create_task(engine.wait_ready())
        await asyncio.sleep(0.01)
        engine.end("there is none")
        with pytest.raises(EngineDeadError, match="there is none"):
            await waits
        await engine.shutdown()


async def test_front_end_that_does_not_receive_delays_no_others(null_model_dir: Path) -> None:
    async with front_ends(null_model_dir, 1) as (owner, (deaf,)):
        client = deaf._clients[0]
        task = asyncio.create_task(tokens(deaf, [1, 2], max_tokens=100))
        await begun(deaf, 1)
        client._receive_lock.acquire()  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(60):
                for _ in range(3):
                    assert len((await tokens(owner, [1, 2]))[0]) == 60
        finally:
            client._receive_lock.release()  # type: ignore[attr-defined]
        assert len((await task)[0]) == 100


async def test_the_queue_limit_is_one_for_all_front_ends(null_model_dir: Path) -> None:
    args: dict[str, Any] = {"max_num_seqs": 1, "max_num_queued_reqs": 3}
    async with front_ends(null_model_dir, 1, **args) as (owner, (other,)):
        ledger = SharedCounters(2)
        for index, engine in enumerate((owner, other)):
            engine.share(ledger.slot(index))
        process_of(owner).send_signal(signal.SIGSTOP)
        tasks = [asyncio.create_task(tokens(engine, [1, 2])) for engine in (owner, other, other)]
        await begun(other, 2)
        await begun(owner, 1)
        for engine in (owner, other):
            with pytest.raises(UnavailableError, match="3 sequences wait"):
                await tokens(engine, [1, 2])
        process_of(owner).send_signal(signal.SIGCONT)
        await asyncio.gather(*tasks)
        assert len((await tokens(other, [1, 2]))[0]) == 60


@pytest.mark.more
async def test_nothing_is_left_of_a_core_with_several_front_ends(
    null_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with front_ends(null_model_dir, 2) as (_, others):
        await tokens(others[1], [1])
        assert os.listdir(tmp_path)
    started = time.monotonic()
    while os.listdir(tmp_path) and time.monotonic() - started < 5:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert not os.listdir(tmp_path)
