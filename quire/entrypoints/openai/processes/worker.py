# SPDX-License-Identifier: Apache-2.0
"""An API worker process, controlled by the supervisor process, which it never outlives.

It exits when the message socket closes, or else within the two seconds allowed to a core (`Parent`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from quire.adapters import AdapterRequest
from quire.engine.async_llm import AsyncLLM
from quire.engine.cores import BorrowedCores
from quire.engine.shared_counters import CounterField, CounterSlot, SharedCounters
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.connection import http_config
from quire.entrypoints.openai.connection_count import ConnectionCount, SharedConnectionCount
from quire.entrypoints.openai.keys import Keyring
from quire.entrypoints.openai.lifecycle import HttpServer, Lifecycle
from quire.entrypoints.openai.processes.acceptor import ConnectionReceiver
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
from quire.entrypoints.openai.processes.supervisor import count_turns
from quire.entrypoints.openai.state import ServerState
from quire.errors import QuireError
from quire.logging_setup import EXIT_FAILED, configure_logging
from quire.metrics.stats import IterationStats, StatLogger
from quire.scheduler.output import SchedulerStats

logger = logging.getLogger(__name__)


class WorkerLifecycle(Lifecycle):
    """Lifecycle of a worker, which follows the supervisor's messages and logs nothing that the supervisor logs."""

    def __init__(self, state: ServerState, http: HttpServer, cores: BorrowedCores) -> None:
        super().__init__(state, http, socket.socket(), needs_key=False)
        self._cores = cores

    def take_in(self, message: Message) -> None:
        """Act on a message of the supervisor."""
        if isinstance(message, CoreStarted):
            self._cores.core_started(message.core, message.address)
        elif isinstance(message, CoreLost):
            self._cores.core_lost(message.core)
        elif isinstance(message, SleepChanged):
            self._state.engine.rest(message.rest, is_falling_asleep=message.is_falling_asleep)
        elif isinstance(message, ServedAdapters):
            self._state.adapters = message.served
        elif isinstance(message, EngineEnded):
            self._state.engine.end(message.reason)
        elif isinstance(message, Drain):
            self.on_signal()
        elif isinstance(message, Cancel):
            self.stop_now()

    def _handle_signals(self) -> None:
        """Keep signals ignored, as from the start of the process."""

    def _listeners(self) -> list[socket.socket]:
        return []

    def _report_failed_start(self, error: QuireError) -> int:
        logger.info("the engine could not start: %s", error)
        return EXIT_FAILED

    async def _check_adapters(self) -> None:
        """Skip: the supervisor checks them."""

    def _report_ready(self) -> None:
        """Skip: the supervisor reports it."""

    def _report_engine_end(self, error: QuireError) -> None:
        """Skip: the supervisor reports it."""

    async def _log_stats(self) -> None:
        """Skip: the supervisor logs them."""


class TokenCounts(StatLogger):
    """Counts this process's computed tokens in the shared counters, for the supervisor's log."""

    def __init__(self, slot: CounterSlot) -> None:
        self._slot = slot

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        self._slot.add(
            CounterField.COMPUTED_TOKENS, iteration.num_prompt_tokens - iteration.num_cached_tokens
        )
        self._slot.add(CounterField.GENERATED_TOKENS, iteration.num_generation_tokens)


class SupervisorProxy:
    """Connection to the supervisor process, and through it to all others."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def ask(self, query: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self._channel.ask(query, *args)
        return answers

    async def run_command(self, command: str, *args: Any) -> Any:
        return await self._channel.execute(command, *args)

    async def share_adapters(self, adapters: Mapping[str, AdapterRequest]) -> None:
        raise AssertionError("the supervisor decides which adapters are served")


class ApiWorker:
    """API worker, from its first message to its exit code."""

    def __init__(
        self, hello: WorkerHello, channel: Channel, connections: socket.socket, counters: IO[bytes]
    ) -> None:
        num_cores = hello.engine.parallel.num_replicas
        slot = SharedCounters(hello.num_pages, len(hello.tenants), counters, num_cores).slot(hello.slot)
        cores = BorrowedCores(hello.engine, hello.front_end)
        connection_count = SharedConnectionCount(slot, whole=bool(hello.server.max_connections))
        self._channel = channel
        self._slot = slot
        self._engine = AsyncLLM(hello.engine, cores=cores)
        self._engine.share(slot)
        self._engine.add_stat_logger(TokenCounts(slot))
        app = build_app(self._engine, hello.server, keys=Keyring(hello.tenants), slot=slot)
        self.state: ServerState = app.state.server
        self.state.siblings = SupervisorProxy(channel)
        self._http = HttpServer(http_config(app, hello.server, connection_count), hello.server)
        self._receiver = _receiver(connections, self._http, connection_count)
        self.lifecycle = WorkerLifecycle(self.state, self._http, cores)

    async def run(self) -> int:
        works = self._listen(), self._open(), count_turns(self._slot)
        background = [asyncio.create_task(work) for work in works]
        try:
            return await self.lifecycle.run()
        finally:
            for task in background:
                task.cancel()
            await self._engine.shutdown()

    async def _listen(self) -> None:
        try:
            await self._channel.run()
            logger.error("the supervisor process has ended")
        finally:
            self.lifecycle.stop_now()

    async def _open(self) -> None:
        """Take connections once this process serves; report readiness once the engine is ready."""
        await self._http.is_open.wait()
        self._receiver.open()
        with suppress(QuireError):  # the lifecycle handles the same error
            await self._engine.wait_ready()
            self._channel.send(WorkerReady())


def _receiver(
    connections: socket.socket, http: HttpServer, connection_count: ConnectionCount
) -> ConnectionReceiver:
    return ConnectionReceiver(connections, http.admit, connection_count)


async def serve(channel_end: socket.socket, connections: socket.socket, counters: IO[bytes]) -> int:
    """Serve until the supervisor stops this process, or ends; return the exit code."""
    workers: list[ApiWorker] = []
    channel = await open_channel(
        channel_end,
        lambda query, *args: workers[0].state.answer(query, *args),
        lambda message: workers[0].lifecycle.take_in(message),
    )
    try:
        hello = await channel.read()
    except (asyncio.IncompleteReadError, OSError):
        return 1
    assert isinstance(hello, WorkerHello)
    configure_logging(hello.engine.observability.log_level, hello.engine.observability.log_format)
    workers.append(ApiWorker(hello, channel, connections, counters))
    return await workers[0].run()
