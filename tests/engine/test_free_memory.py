# SPDX-License-Identifier: Apache-2.0
"""New work is refused while memory is short and requests are in flight, and never for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.async_llm import AsyncLLM
from quire.engine.queue_limits import MIB, READ_EVERY_S, FreeMemory, bytes_to_keep
from quire.errors import MemoryShortError
from quire.metrics.stats import StatLogger
from quire.sampling_params import SamplingParams
from tests.engine.test_queue_limits import make_engine

pytestmark = pytest.mark.item(52)
MORE_THAN_THERE_IS = 10**9


class Machine:
    """Fake free memory and clock of a machine, which counts the readings."""

    def __init__(self, left_mib: int = 1000) -> None:
        self.left_bytes, self.now, self.num_readings = left_mib * MIB, 0.0, 0

    def read(self) -> int:
        self.num_readings += 1
        return self.left_bytes

    def memory(self, kept_mib: int) -> FreeMemory:
        return FreeMemory(kept_mib * MIB, self.read, lambda: self.now)


def test_refusal_has_the_numbers_and_retry_after() -> None:
    with pytest.raises(MemoryShortError, match=r"99 MiB are free .* need 100 MiB") as caught:
        Machine(99).memory(100).check()
    assert caught.value.retry_after > 0
    Machine(100).memory(100).check()


def test_nothing_is_read_if_nothing_is_to_stay_free() -> None:
    machine = Machine(0)
    machine.memory(0).check()
    assert machine.num_readings == 0


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 1)), max_size=30))
def test_free_memory_uses_the_last_reading_and_reads_seldom(course: list[tuple[int, float]]) -> None:
    machine = Machine()
    memory, known, next_reading = machine.memory(100), 0, 0.0
    for left_mib, pause_s in course:
        machine.left_bytes = left_mib * MIB
        machine.now += pause_s
        if machine.now >= next_reading:
            known, next_reading = left_mib, machine.now + READ_EVERY_S
        if known < 100:
            with pytest.raises(MemoryShortError):
                memory.check()
        else:
            memory.check()
    assert machine.num_readings <= 1 + machine.now / READ_EVERY_S


def test_a_reading_that_fails_changes_nothing() -> None:
    machine = Machine(50)

    def read() -> int:
        if machine.now > 1:
            raise OSError(24, "Too many open files")
        return machine.read()

    memory = FreeMemory(100 * MIB, read, lambda: machine.now)
    for machine.now in (1, 2):
        with pytest.raises(MemoryShortError):
            memory.check()
    FreeMemory(100 * MIB, read, lambda: machine.now).check()  # nothing was ever known


@pytest.mark.parametrize(
    ("asked", "total_mib", "kept_mib"),
    [(None, 1000, 30), (None, 10**6, 256), (0, 1000, 0), (7, 1000, 7), (5000, 1000, 5000)],
)
def test_memory_to_keep_free_follows_the_option(asked: int | None, total_mib: int, kept_mib: int) -> None:
    assert bytes_to_keep(asked, total_mib * MIB) == kept_mib * MIB


class Refusals(StatLogger):
    def __init__(self) -> None:
        self.limits: list[str] = []

    def record(self, *_: Any) -> None:
        pass

    def refused(self, limit: str) -> None:
        self.limits.append(limit)


async def in_flight(engine: AsyncLLM) -> asyncio.Task[str]:
    """A request that has joined the engine; nothing of it is taken in before the caller waits for something."""

    async def run() -> str:
        async for output in engine.generate([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True), "a"):
            last = output
        return str(last.outputs[0].finish_reason)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    assert engine.num_unfinished_requests()
    return task


async def test_one_request_at_a_time_is_served_however_little_is_left(null_model_dir: Path) -> None:
    """A request in flight continues without free memory, and with none in flight the next is admitted."""
    engine = make_engine(null_model_dir, min_free_memory=MORE_THAN_THERE_IS)
    await engine.wait_ready()
    refusals = Refusals()
    engine.add_stat_logger(refusals)
    for _ in range(2):
        with engine.reserve():
            pass
        task = await in_flight(engine)
        with pytest.raises(MemoryShortError):
            engine.reserve()
        assert await task == "length"
    assert refusals.limits == ["min_free_memory"] * 2
    await engine.shutdown()


async def test_by_default_a_machine_with_memory_refuses_nothing(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir)
    await engine.wait_ready()
    task = await in_flight(engine)
    with engine.reserve():
        pass
    assert await task == "length"
    await engine.shutdown()
