# SPDX-License-Identifier: Apache-2.0
"""Tests of communication among API processes: messages, connections, and the accounts of tenants."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import ServerConfig
from quire.engine.shared_counters import CounterField, SharedCounters
from quire.entrypoints.openai.api_server import bind
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.connection_count import SharedConnectionCount
from quire.entrypoints.openai.keys import Tenant
from quire.entrypoints.openai.middleware.quota import Meters
from quire.entrypoints.openai.processes import acceptor
from quire.entrypoints.openai.processes.acceptor import ConnectionAcceptor, ConnectionReceiver
from quire.entrypoints.openai.processes.channel import (
    Channel,
    Drain,
    Message,
    WorkerHello,
    WorkerReady,
    open_channel,
)
from quire.entrypoints.openai.processes.supervisor import ApiServerSupervisor
from quire.entrypoints.openai.state import ServerState
from quire.errors import (
    ConflictError,
    EngineError,
    QuireError,
    RateLimitError,
    UnavailableError,
    ValidationError,
)
from quire.metrics.stats import FinishedRequestStats, IterationStats
from tests.entrypoints.openai.fake_engine import FakeEngine

# Messages


@asynccontextmanager
async def channels(answer: Any) -> AsyncIterator[tuple[Channel, Channel, list[Message]]]:
    """Both ends, the second of which answers, and what that one was told."""
    told: list[Message] = []
    one, other = socket.socketpair()
    ends = await open_channel(one, answer, told.append), await open_channel(other, answer, told.append)
    running = [asyncio.create_task(end.run()) for end in ends]
    try:
        yield *ends, told
    finally:
        for end in ends:
            end.close()
        await asyncio.gather(*running)


async def echo(question: str, *args: Any) -> Any:
    await asyncio.sleep(0.01 if question == "slow" else 0)
    return [question, *args]


async def test_each_query_gets_its_answer() -> None:
    async with channels(echo) as (one, other, told):
        large = "x" * 3_000_000
        asked = [one.ask("slow", 1), one.ask("quick", large), other.ask("quick", None)]
        assert await asyncio.gather(*asked) == [["slow", 1], ["quick", large], ["quick", None]]
        one.send(WorkerReady())
        one.send(Drain())
        await one.ask("quick")
        assert told == [WorkerReady(), Drain()]


async def test_a_question_that_cannot_be_answered_costs_only_itself() -> None:
    async def fails(question: str, *args: Any) -> Any:
        if question == "bad":
            raise ValueError("no")
        return question

    async with channels(fails) as (one, _, _):
        with pytest.raises(EngineError, match="has no answer"):
            await one.ask("bad")
        assert await one.ask("good") == "good"


@pytest.mark.parametrize(
    "error",
    [
        ValidationError("no such level", param="level"),
        ConflictError("not now"),
        UnavailableError("later", retry_after=7),
        EngineError("no memory"),
    ],
)
async def test_refusal_keeps_its_class_and_message(error: QuireError) -> None:
    async def refuse(question: str) -> Any:
        raise error

    async with channels(refuse) as (one, _, _):
        with pytest.raises(type(error)) as refused:
            await one.execute("?")
        assert (str(refused.value), vars(refused.value)) == (str(error), vars(error))


async def test_lost_process_answers_nothing_and_delays_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(question: str) -> Any:
        await asyncio.Event().wait()

    async with channels(never) as (one, other, _):
        asked = asyncio.create_task(one.ask("?"))
        await asyncio.sleep(0.01)
        other.close()
        with pytest.raises(EngineError):
            await asked
        one.send(WorkerReady())
    monkeypatch.setattr("quire.entrypoints.openai.processes.channel.PATIENCE_S", 0.05)
    async with channels(never) as (one, _, _):
        with pytest.raises(EngineError, match="does not answer"):
            await one.ask("?")


# Connections


class ConnectionTarget:
    """A process that answers each connection with its slot."""

    def __init__(self, slot: int, counters: SharedCounters) -> None:
        self.slot = slot
        self.connections, theirs = socket.socketpair()
        self.connections.setblocking(False)
        self.admitted: list[socket.socket] = []
        self.connection_count = SharedConnectionCount(counters.slot(slot), whole=True)
        self.receiver = ConnectionReceiver(theirs, self.admit, self.connection_count)
        self.receiver.open()
        self._theirs = theirs

    def admit(self, connection: socket.socket) -> None:
        connection.sendall(str(self.slot).encode())
        self.admitted.append(connection)

    def close(self) -> None:
        if self._theirs.fileno() >= 0:
            self.receiver.close()
        for end in (self.connections, self._theirs, *self.admitted):
            end.close()


class AcceptorWithTargets:
    """Acceptor with targets."""

    def __init__(self, num_targets: int) -> None:
        self.counters = SharedCounters(num_targets + 1)
        self.targets = [ConnectionTarget(slot, self.counters) for slot in range(1, num_targets + 1)]
        self.own: list[socket.socket] = []
        self.listener = bind("127.0.0.1", 0)
        self.acceptor = ConnectionAcceptor(self.listener, self.counters, self.admit, lambda: self.targets)

    def admit(self, connection: socket.socket) -> None:
        connection.sendall(b"0")
        self.own.append(connection)

    async def connect(self) -> tuple[int, asyncio.StreamWriter]:
        """Connect and return the number of the process that answers, with the writer that closes the connection."""
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        async with asyncio.timeout(300):
            return int(await reader.readexactly(1)), writer


@asynccontextmanager
async def acceptor_with_targets(num_targets: int) -> AsyncIterator[AcceptorWithTargets]:
    it = AcceptorWithTargets(num_targets)
    it.acceptor.open()
    try:
        yield it
    finally:
        it.acceptor.close()
        for target in it.targets:
            target.close()
        for end in (it.listener, *it.own):
            end.close()


async def pages_of(it: AcceptorWithTargets, num: int) -> tuple[list[int], list[asyncio.StreamWriter]]:
    connected = [await it.connect() for _ in range(num)]
    return [slot for slot, _ in connected], [writer for _, writer in connected]


@pytest.mark.parametrize(("num_targets", "num_connections"), [(0, 3), (1, 6), (3, 14)])
async def test_connections_are_spread_evenly(num_targets: int, num_connections: int) -> None:
    async with acceptor_with_targets(num_targets) as it:
        slots, writers = await pages_of(it, num_connections)
        counts = [slots.count(slot) for slot in range(num_targets + 1)]
        assert max(counts) - min(counts) <= 1
        assert it.counters.total(CounterField.HANDED) == num_connections
        for writer in writers:
            writer.close()


async def test_connection_goes_to_the_least_loaded_in_turns() -> None:
    async with acceptor_with_targets(2) as it:
        slots, writers = await pages_of(it, 6)
        for _ in range(2):
            it.targets[0].connection_count.leave()
        more, more_writers = await pages_of(it, 2)
        assert (sorted(slots), more) == ([0, 0, 1, 1, 2, 2], [1, 1])
        turns = set()
        for _ in range(6):
            slot, writer = await it.connect()
            turns.add(slot)
            it.counters.add(slot, CounterField.CLOSED, 1)
            writer.close()
        assert turns == {0, 1, 2}
        for writer in (*writers, *more_writers):
            writer.close()


async def test_lost_or_full_worker_is_skipped() -> None:
    async with acceptor_with_targets(2) as it:
        closed, full = it.targets
        closed.receiver.close()
        closed._theirs.close()
        full.receiver.close()
        full.connections.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        while True:
            try:
                full.connections.send(b"." * 1000)
            except BlockingIOError:
                break
        slots, writers = await pages_of(it, 5)
        assert slots == [0] * 5
        for writer in writers:
            writer.close()


async def test_connections_wait_while_no_file_descriptor_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.05)

    class Full:
        """A listener for which there is no target at first."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener = listener
            self.num_failed = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.listener, name)

        def accept(self) -> Any:
            if self.num_failed < 3:
                self.num_failed += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self.listener.accept()

    async with acceptor_with_targets(1) as it:
        it.acceptor._listener = full = Full(it.listener)  # type: ignore[assignment]
        _, writer = await it.connect()
        assert full.num_failed == 3
        writer.close()


# Accounts

TENANTS = {
    "a": Tenant(keys=["k"], max_concurrent=2, requests_per_minute=6),
    "b": Tenant(keys=["l"], tokens_per_minute=100),
    "free": Tenant(keys=["m"]),
}
event = st.tuples(
    st.sampled_from(["enter", "leave", "tokens", "wait"]),
    st.sampled_from(sorted(TENANTS)),
    st.integers(0, 2),
    st.integers(0, 60),
)


@given(st.lists(event, max_size=40))
def test_tenant_limits_hold_in_total_over_all_processes(
    events: list[tuple[str, str, int, int]],
) -> None:
    """Several processes refuse and admit what a single one would."""
    now = 5.0
    counters = SharedCounters(3, len(TENANTS))
    several = [Meters(TENANTS, lambda: now, counters.slot(index)) for index in range(3)]
    single = Meters(TENANTS, lambda: now)
    running: list[tuple[str, int]] = []
    for kind, name, process, amount in events:
        if kind == "wait":
            now += amount
        elif kind == "enter":
            outcomes = [_enters(meters, name) for meters in (single, several[process])]
            assert outcomes[0] == outcomes[1]
            assert single[name].headers() == several[process][name].headers()
            running += [(name, process)] if outcomes[0] is None else []
        elif kind == "leave" and running:
            left, where = running.pop()
            single[left].leave()
            several[where][left].leave()
        elif kind == "tokens":
            ended = FinishedRequestStats("stop", amount, 1, 0, 0, None, 0, 0, 0, 0, tenant=name)
            for meters in (single, several[process]):
                meters.record(IterationStats(finished=[ended]), None, 0)


def _enters(meters: Meters, name: str) -> str | None:
    try:
        meters[name].enter()
    except RateLimitError as error:
        return f"{error} {error.retry_after}"
    return None


def test_requests_of_a_dead_process_no_longer_count() -> None:
    counters = SharedCounters(2, len(TENANTS))
    alive, dead = (Meters(TENANTS, lambda: 1.0, counters.slot(index)) for index in range(2))
    for _ in range(2):
        dead["a"].enter()
    with pytest.raises(RateLimitError, match="2 requests of this key are running"):
        alive["a"].enter()
    counters.clear(1)
    alive["a"].enter()


# Processes


class Owner:
    """Owner of a core that records which front ends it was asked to forget."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def forget(self, front_end: int) -> None:
        self.forgotten.append(front_end)


def make_supervisor(owner: Owner, num_slots: int, counters: SharedCounters) -> ApiServerSupervisor:
    engine = FakeEngine()
    state: ServerState = build_app(engine, ServerConfig()).state.server  # type: ignore[arg-type]
    return ApiServerSupervisor(
        state, owner, counters, WorkerHello(0, num_slots, 0, engine.config, ServerConfig(), {})
    )


async def test_crashing_processes_restart_with_backoff_first_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.entrypoints.openai.processes.supervisor.PROGRAM", "no.such.module")
    monkeypatch.setattr("quire.entrypoints.openai.processes.supervisor.BACKOFF_S", (0.0, 0.01, 60.0))
    owner = Owner()
    with closing(SharedCounters.create(3, 0)) as counters:
        supervisor = make_supervisor(owner, 3, counters)
        supervisor.open()
        async with asyncio.timeout(60):
            while len(owner.forgotten) < 6:
                assert supervisor.targets() == []
                assert await supervisor.ask("load") == [0]
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await supervisor.close()
    assert sorted(owner.forgotten) == [1, 2, 3, 4, 5, 6], "no number comes twice"
    delays = [record.args[2] for record in caplog.records if "restarting it" in record.msg]  # type: ignore[index]
    assert sorted(delays) == [0.0, 0.0, 0.01, 0.01, 60.0, 60.0]


async def test_a_process_that_cannot_be_started_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with closing(SharedCounters.create(2, 0)) as counters:
        supervisor = make_supervisor(Owner(), 2, counters)
        supervisor.open()
        async with asyncio.timeout(60):
            while "no more processes" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await supervisor.ask("load") == [0]
        await supervisor.close()
