# SPDX-License-Identifier: Apache-2.0
"""The spare server: one at most, replaced when it dies, gone when memory is short, and a server like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from quire.model_router import spare
from quire.model_router.memory import PROCESS_BYTES
from quire.model_router.spare import Spare
from tests.model_router.fakes import entry, serving


class FakeProcess:
    """Process that ends when it is told to, or killed."""

    def __init__(self) -> None:
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        return self._reason.done()

    def die(self, reason: str) -> None:
        self._reason.set_result(reason)

    def kill(self) -> None:
        if not self.has_ended:
            self.die("killed")

    async def ended(self) -> str:
        return await asyncio.shield(self._reason)


class Spawner:
    """Starts fake processes, or fails as often as it is told to."""

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []
        self.num_failures = 0

    async def __call__(self) -> FakeProcess:
        await asyncio.sleep(0)
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(11, "no process is left")
        self.processes.append(FakeProcess())
        return self.processes[-1]

    @property
    def num_running(self) -> int:
        return sum(not process.has_ended for process in self.processes)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "FIRST_BACKOFF_S", 0.0)


async def test_one_is_kept_and_whoever_takes_it_owns_it() -> None:
    spawn = Spawner()
    kept = Spare(spawn)
    for _ in range(3):
        kept.keep(True)
    process = await kept.take()  # one that is being started is waited for
    assert [process] == spawn.processes
    assert not kept.is_there
    assert await kept.take() is None
    kept.keep(True)
    await until(lambda: len(spawn.processes) == 2)
    await kept.close()
    assert [one.has_ended for one in spawn.processes] == [False, True]
    process.kill()


async def test_one_that_dies_is_replaced() -> None:
    spawn = Spawner()
    kept = Spare(spawn)
    spawn.num_failures = 2
    kept.keep(True)
    await until(lambda: spawn.num_running == 1)
    for number in range(1, 4):
        spawn.processes[-1].die("exit code 1")
        await until(lambda number=number: len(spawn.processes) == number + 1)
    assert spawn.num_running == 1
    await kept.close()
    assert spawn.num_running == 0


async def test_time_to_the_next_one_doubles_until_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def call_later(delay_s: float, work: Callable[[], None]) -> asyncio.TimerHandle:
        delays.append(delay_s)
        return later(0.0, work)

    monkeypatch.setattr(spare, "FIRST_BACKOFF_S", 2.0)
    monkeypatch.setattr(loop, "call_later", call_later)
    spawn = Spawner()
    kept = Spare(spawn)
    spawn.num_failures = 8
    kept.keep(True)
    await until(lambda: spawn.num_running == 1)
    assert delays == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0, 120.0]
    assert await kept.take() is spawn.processes[0]
    spawn.num_failures = 1
    kept.keep(True)
    await until(lambda: len(spawn.processes) == 2)
    assert delays[8:] == [2.0]
    await kept.close()


async def test_one_that_is_not_wanted_ends_before_another_begins() -> None:
    spawn = Spawner()
    kept = Spare(spawn)
    kept.keep(True)
    await until(lambda: spawn.num_running == 1)
    kept.keep(False)
    assert await kept.take() is None, "a process that ends serves nobody"
    kept.keep(True)
    assert len(spawn.processes) == 1
    await until(lambda: len(spawn.processes) == 2)
    kept.keep(False)
    await kept.settle()
    assert (spawn.num_running, kept.is_there) == (0, False)
    kept.keep(True)
    kept.keep(False)  # while it is being started
    await kept.settle()
    assert (spawn.num_running, kept.is_there) == (0, False)


MEMORY = 3 * PROCESS_BYTES


async def test_loads_take_the_spare_that_is_kept_while_memory_is_left() -> None:
    models = (entry("a", memory_bytes=PROCESS_BYTES), entry("b", memory_bytes=2 * PROCESS_BYTES))
    async with serving(*models, memory=MEMORY, keeps_spare=True) as service:
        starter = service.starter
        assert starter.has_spare
        await service.ask("a")
        assert starter.taken == ["a"]
        assert starter.has_spare, "the next one is there for b"
        service.starter.holds.add("b")
        waiting = asyncio.create_task(service.ask("b"))
        await service.until(lambda: service.status("b") == "loading" and "b" in starter.children)
        assert starter.taken == ["a", "b"]
        assert not starter.has_spare, "no memory is left, and a load needs the cores"
        service.child("b").may_start.set()
        await waiting
        assert not starter.has_spare
        service.child("a").die("killed by signal 9 (Killed)")
        await service.until(lambda: service.status("a") == "unloaded" and starter.has_spare)


async def test_spare_that_is_of_no_use_is_not_kept() -> None:
    """Once all models are loaded; where memory is short; and as the flag says."""
    async with serving(entry("a"), memory=MEMORY, keeps_spare=True) as service:
        assert service.starter.has_spare
        await service.ask("a")
        assert not service.starter.has_spare
    async with serving(entry("a"), memory=PROCESS_BYTES - 1, keeps_spare=True) as service:
        await service.ask("a")
        assert (service.starter.has_spare, service.starter.taken) == (False, [])
    async with serving(entry("a"), memory=MEMORY) as service:
        await service.ask("a")
        assert (service.starter.has_spare, service.starter.taken) == (False, [])
