# SPDX-License-Identifier: Apache-2.0
"""Supervisor of a server's API workers, in the first API process, which also serves requests itself.

Invariant: it alone binds the port, owns the cores and handles signals; its exit code is the server's. Each slot of the
shared counters has one worker, or one about to start, until shutdown. A worker's requests in a core end with it.
Workers learn of the cores from here and continue their own requests.
Nothing is forked or pickled: a worker is started by module name with three open files, its ends of two socket pairs
(messages, connections) and the shared counters. Workers count the turns of their event loop there; `ProcessHeartbeat`
tells hanging from long computation as for a core (`quire.supervision.progress`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any, Protocol

from quire.adapters import AdapterRequest
from quire.config import ServerConfig
from quire.engine.client import CoreAddress
from quire.engine.shared_counters import CounterField, CounterSlot, SharedCounters
from quire.engine.sleep_state import EngineSleepState
from quire.entrypoints.openai.app import build_app, keyring
from quire.entrypoints.openai.connection import GRACEFUL_SHUTDOWN_S, http_config
from quire.entrypoints.openai.connection_count import SharedConnectionCount
from quire.entrypoints.openai.lifecycle import HttpServer, Lifecycle
from quire.entrypoints.openai.metrics import QUERY as METRICS
from quire.entrypoints.openai.metrics import MergedMetrics, families_of
from quire.entrypoints.openai.processes.acceptor import SUPERVISOR_SLOT, ConnectionAcceptor
from quire.entrypoints.openai.processes.channel import (
    Cancel,
    Channel,
    CoreLost,
    CoreStarted,
    Drain,
    EngineEnded,
    Message,
    ServedAdapters,
    SleepChanged,
    WorkerHello,
    WorkerReady,
    open_channel,
)
from quire.entrypoints.openai.service_manager import ServiceManager
from quire.entrypoints.openai.state import ServerState
from quire.errors import QuireError
from quire.metrics.stats import IterationStats
from quire.processes import exit_reason, start_python
from quire.supervision.progress import Heartbeat, cpu_seconds

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

BEAT_S = 0.5  # Interval of a worker's counting, and of the supervisor's polling.
HUNG_S = 10.0
"""Limit without a turn and without CPU use, after which a worker is killed. A worker's loop never waits for the core or
the log, so `STALL_S` (5 s) would suffice; twice that allows for swapping.
"""

PROGRAM = "quire.entrypoints.openai.processes.worker_process"
END_S = 1.0  # Time for a process that has closed its sockets to exit.
# Delays before the first, second ... restart of a worker that ran for less than STEADY_S each time.
BACKOFF_S = (0.0, 1.0, 5.0, 30.0)
STEADY_S = 60.0


async def count_turns(slot: CounterSlot) -> None:
    """Count event loop turns forever."""
    while True:
        slot.add(CounterField.TURNS, 1)
        await asyncio.sleep(BEAT_S)


class ProcessHeartbeat:
    """Heartbeat of one worker as seen by the supervisor, from its start on, since loading computes."""

    def __init__(self, counters: SharedCounters, slot: int, pid: int) -> None:
        self._counters = counters
        self._slot = slot
        self._pid = pid
        self._heartbeat = Heartbeat(HUNG_S)

    @property
    def stalls(self) -> bool:
        """True if the worker seems to hang and should get no connections."""
        return self._heartbeat.stalls

    @property
    def silent_s(self) -> float:
        return self._heartbeat.silent_s

    def hangs(self) -> bool:
        """Poll once; True if the worker must be killed."""
        num_turns = 1 + int(self._counters.get(self._slot, CounterField.TURNS))
        return self._heartbeat.hangs(time.monotonic(), num_turns, cpu_seconds(self._pid))


class WorkerHandle:
    """Handle of one worker: slot, front-end number, process, heartbeat, and both socket ends."""

    def __init__(
        self,
        slot: int,
        front_end: int,
        process: subprocess.Popen[bytes],
        heartbeat: ProcessHeartbeat,
        channel: Channel,
        connections: socket.socket,
    ) -> None:
        self.slot = slot
        self.front_end = front_end
        self.process = process
        self.heartbeat = heartbeat
        self.channel = channel
        self.connections = connections
        self.is_up = False
        self.metrics: list[Any] = []

    @property
    def serves(self) -> bool:
        """True if it takes connections and queries."""
        return self.is_up and not self.heartbeat.stalls

    async def end(self) -> str:
        """Make sure that the process has exited; return how it ended."""
        self.connections.close()
        try:
            code = await asyncio.to_thread(self.process.wait, END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = await asyncio.to_thread(self.process.wait)
        return exit_reason(code)


def launch(counters: SharedCounters) -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket]:
    """Start a worker; return the process and our socket ends for messages and connections.

    Raises:
        OSError: it cannot be started; all sockets are closed.
    """
    with ExitStack() as on_error:
        channel, their_channel = socket.socketpair()
        connections, their_connections = socket.socketpair()
        on_error.callback(channel.close)
        on_error.callback(connections.close)
        connections.setblocking(False)
        with their_channel, their_connections:
            fds = their_channel.fileno(), their_connections.fileno(), counters.fileno()
            program = ["-m", PROGRAM, str(os.getpid()), *map(str, fds)]
            process = start_python(program, stdin=subprocess.DEVNULL, pass_fds=fds)
        on_error.pop_all()
        return process, channel, connections


class CoreOwner(Protocol):
    """Owner of the cores, which drops the requests of a dead front end."""

    def forget(self, front_end: int) -> None: ...


class ApiServerSupervisor:
    """Starts, restarts and stops the workers, and exchanges messages with them.

    Args:
        hello: first message to every worker; slot and front-end number are filled in.
    """

    def __init__(
        self, state: ServerState, owner: CoreOwner, counters: SharedCounters, hello: WorkerHello
    ) -> None:
        self._state = state
        self._owner = owner
        self._counters = counters
        self._hello = hello
        self._numbers = itertools.count(1)
        self._workers: dict[int, WorkerHandle] = {}
        self._supervising: list[asyncio.Task[None]] = []
        self._cores: dict[int, CoreAddress] = {}
        self._resting = SleepChanged(EngineSleepState(), is_falling_asleep=False)
        self._reaped_metrics: list[Any] = []
        self._closing = False

    def open(self) -> None:
        """Start the workers."""
        slots = range(1, self._counters.num_slots)
        self._supervising = [asyncio.create_task(self._supervise(slot)) for slot in slots]

    def targets(self) -> list[WorkerHandle]:
        """Return the workers that take connections."""
        return [] if self._closing else [worker for worker in self._workers.values() if worker.serves]

    async def ask(self, query: str, *args: Any) -> list[Any]:
        """Return every process's answer, the own first. For metrics, dead workers' counts are included."""
        workers = list(self._workers.values())
        own, answers = await asyncio.gather(self._state.answer(query, *args), self._ask_others(query, *args))
        if query == METRICS:
            return [own, *(worker.metrics for worker in workers), self._reaped_metrics]
        return [own, *(answer for answer in answers if answer is not None)]

    async def run_command(self, command: str, *args: Any) -> Any:
        return await self._state.execute_command(command, *args)

    async def share_adapters(self, adapters: Mapping[str, AdapterRequest]) -> None:
        self._send_all(ServedAdapters(dict(adapters)))
        await self.num_unfinished()  # an answer shows that earlier messages were processed

    # The cores

    def core_started(self, core: int, address: CoreAddress) -> None:
        self._cores[core] = address
        self._send_all(CoreStarted(core, address))

    def core_lost(self, core: int) -> None:
        self._cores.pop(core, None)
        self._send_all(CoreLost(core))

    # Sleep: the workers are the cores' other front ends

    async def rest(self, rest: EngineSleepState, *, is_falling_asleep: bool) -> None:
        self._resting = SleepChanged(rest, is_falling_asleep)
        self._send_all(self._resting)
        await self.num_unfinished()  # an answer shows that earlier messages were processed

    async def abort(self) -> None:
        await self._ask_others("abort", None)

    async def num_unfinished(self) -> int:
        """Return the workers' unfinished sequences; a worker that does not answer counts as one."""
        return sum(1 if answer is None else answer for answer in await self._ask_others("unfinished"))

    # Shutdown

    def drain(self) -> None:
        """Start no more workers, and let the running ones finish their requests and exit."""
        self._closing = True
        self._send_all(Drain())

    def cancel(self) -> None:
        self._closing = True
        self._send_all(Cancel())

    def end(self, reason: str) -> None:
        """Report to the workers that the engine has stopped."""
        self._closing = True
        self._send_all(EngineEnded(reason))

    async def wait_gone(self) -> None:
        """Wait until no worker is left."""
        while self._workers:  # noqa: ASYNC110  (only while the server ends)
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Kill the remaining workers, after a grace period if they were asked to exit."""
        if self._closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACEFUL_SHUTDOWN_S):
                    await self.wait_gone()
        self._closing = True
        for worker in self._workers.values():
            worker.process.kill()
        for task in self._supervising:
            task.cancel()
        await asyncio.gather(*self._supervising, return_exceptions=True)
        for worker in list(self._workers.values()):
            await self._reap(worker)

    # One worker

    async def _supervise(self, slot: int) -> None:
        """Keep a worker running in this slot until shutdown."""
        delays = _delays()
        while not self._closing:
            started = time.monotonic()
            how = await self._run_worker(slot)
            if time.monotonic() - started > STEADY_S:
                delays = _delays()
            if not self._closing:
                delay_s = next(delays)
                logger.error("API process %d ended (%s); restarting it in %g s", slot, how, delay_s)
                await asyncio.sleep(delay_s)

    async def _run_worker(self, slot: int) -> str:
        """Run one worker of this slot from start to end; return how it ended."""
        try:
            worker = await self._start(slot)
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        watching = asyncio.create_task(_watch(worker))
        try:
            await worker.channel.run()
        except Exception:  # a bug in quire, which may cost that worker but not the server
            logger.exception("invalid message from API process %d", slot)
        finally:
            watching.cancel()
        return await self._reap(worker)

    async def _start(self, slot: int) -> WorkerHandle:
        front_end = next(self._numbers)
        # Takes milliseconds; a thread could be abandoned by a cancellation.
        process, channel_end, connections = launch(self._counters)
        channel = await open_channel(channel_end, self._answer, lambda message: self._take_in(slot, message))
        heartbeat = ProcessHeartbeat(self._counters, slot, process.pid)
        self._workers[slot] = worker = WorkerHandle(slot, front_end, process, heartbeat, channel, connections)
        channel.send(_hello_for(self._hello, slot, front_end))
        for core, address in self._cores.items():
            channel.send(CoreStarted(core, address))
        channel.send(self._resting)
        channel.send(ServedAdapters(dict(self._state.adapters)))
        if self._closing:  # shutdown has begun meanwhile
            channel.send(Cancel())
        return worker

    async def _reap(self, worker: WorkerHandle) -> str:
        """Remove a dead worker, but keep its metrics."""
        worker.is_up = False
        how = await worker.end()
        del self._workers[worker.slot]
        self._owner.forget(worker.front_end)
        self._counters.clear(worker.slot)
        self._reaped_metrics = families_of(MergedMetrics([self._reaped_metrics, worker.metrics]))
        return how

    def _take_in(self, slot: int, message: Message) -> None:
        assert isinstance(message, WorkerReady)
        self._workers[slot].is_up = True
        logger.info("API process %d is ready (pid %d)", slot, self._workers[slot].process.pid)

    async def _answer(self, query: str, *args: Any) -> Any:
        """Handle a worker's query: ask all processes, or execute a command."""
        handler = self.run_command if query in self._state.command_handlers else self.ask
        return await handler(query, *args)

    async def _ask_others(self, query: str, *args: Any) -> list[Any]:
        """Return the workers' answers, None for each that failed."""
        workers = [worker for worker in self._workers.values() if worker.serves]
        return await asyncio.gather(*(self._answer_of(worker, query, *args) for worker in workers))

    async def _answer_of(self, worker: WorkerHandle, query: str, *args: Any) -> Any:
        """Return a worker's answer; None if it failed."""
        try:
            answer = await worker.channel.ask(query, *args)
        except QuireError as error:
            logger.warning("API process %d failed to answer the query %r: %s", worker.slot, query, error)
            return None
        if query == METRICS:
            worker.metrics = answer
        return answer

    def _send_all(self, message: Message) -> None:
        for worker in self._workers.values():
            worker.channel.send(message)


async def _watch(worker: WorkerHandle) -> None:
    """Kill a worker that hangs; its channel and connections end with it."""
    while not worker.heartbeat.hangs():  # noqa: ASYNC110  (polled)
        await asyncio.sleep(BEAT_S)
    logger.error(
        "API process %d has made no progress for %.0f s; killing it", worker.slot, worker.heartbeat.silent_s
    )
    worker.process.kill()


def _delays() -> Iterator[float]:
    return itertools.chain(BACKOFF_S, itertools.repeat(BACKOFF_S[-1]))


def _hello_for(hello: WorkerHello, slot: int, front_end: int) -> WorkerHello:
    return WorkerHello(slot, hello.num_pages, front_end, hello.engine, hello.server, hello.tenants)


async def serve_supervisor(
    engine: AsyncLLM, config: ServerConfig, listener: socket.socket, service_manager: ServiceManager
) -> int:
    """Serve as the supervisor process; return the exit code. The caller shuts the engine down."""
    keys = keyring(config)
    num_cores = engine.config.parallel.num_replicas
    counters = SharedCounters.create(config.api_server_count, len(keys.tenants), num_cores)
    slot = counters.slot(SUPERVISOR_SLOT)
    engine.share(slot)
    app = build_app(engine, config, keys=keys, slot=slot)
    http = HttpServer(
        http_config(app, config, SharedConnectionCount(slot, whole=bool(config.max_connections))), config
    )
    state: ServerState = app.state.server
    hello = WorkerHello(
        SUPERVISOR_SLOT, config.api_server_count, SUPERVISOR_SLOT, engine.config, config, keys.tenants
    )
    supervisor = ApiServerSupervisor(state, engine, counters, hello)
    state.siblings = supervisor
    engine.watch_cores(supervisor)
    engine.sleep_with(supervisor)
    supervisor.open()
    with closing(counters):
        try:
            lifecycle = SupervisorLifecycle(state, http, listener, supervisor, counters, service_manager)
            return await lifecycle.run()
        finally:
            await supervisor.close()


class SupervisorLifecycle(Lifecycle):
    """Lifecycle of the supervisor process, which stops the workers before it exits."""

    def __init__(
        self,
        state: ServerState,
        http: HttpServer,
        listener: socket.socket,
        supervisor: ApiServerSupervisor,
        counters: SharedCounters,
        service_manager: ServiceManager,
    ) -> None:
        super().__init__(state, http, listener, needs_key=bool(state.keys), service_manager=service_manager)
        self._supervisor = supervisor
        self._tokens = OtherProcessTokens(counters)
        self._acceptor = ConnectionAcceptor(listener, counters, http.admit, supervisor.targets)

    async def run(self) -> int:
        self._opening = asyncio.create_task(self._open())
        return await super().run()

    async def _open(self) -> None:
        """Open the port once this process serves; until then connections wait in the kernel."""
        await self._http.is_open.wait()
        self._acceptor.open()

    def _listeners(self) -> list[socket.socket]:
        return []

    def _stop_accepting(self) -> None:
        self._opening.cancel()
        self._acceptor.close()

    def _report_engine_end(self, error: QuireError) -> None:
        super()._report_engine_end(error)
        self._supervisor.end(str(error))

    def _begin_draining(self) -> None:
        super()._begin_draining()
        self._supervisor.drain()

    async def _wait_idle(self) -> None:
        await super()._wait_idle()
        await self._supervisor.wait_gone()

    def _cancel_all(self) -> None:
        super()._cancel_all()
        self._supervisor.cancel()

    def _other_processes_stats(self) -> IterationStats:
        return self._tokens.since_last()


class OtherProcessTokens:
    """Tokens computed by the other processes, from the shared counters."""

    def __init__(self, counters: SharedCounters) -> None:
        self._counters = counters
        self._seen = dict[tuple[int, CounterField], float]()

    def since_last(self) -> IterationStats:
        return IterationStats(
            num_prompt_tokens=self._new_tokens(CounterField.COMPUTED_TOKENS),
            num_generation_tokens=self._new_tokens(CounterField.GENERATED_TOKENS),
        )

    def _new_tokens(self, column: CounterField) -> int:
        num_tokens = 0.0
        for slot in range(SUPERVISOR_SLOT + 1, self._counters.num_slots):
            before, now = self._seen.get((slot, column), 0.0), self._counters.get(slot, column)
            num_tokens += now - before if now >= before else now  # a restarted process counts from 0
            self._seen[slot, column] = now
        return int(num_tokens)
