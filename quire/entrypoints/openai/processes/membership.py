"""What an API process besides the first does between the first word that it hears and its exit code.

Invariant: it is told everything by the first process, and ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from quire.engine.async_llm import AsyncLLM
from quire.engine.cores import BorrowedCores
from quire.engine.ledger import Column, Ledger, Page
from quire.entrypoints.openai.api_server import http_config
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.census import Census, SharedCensus
from quire.entrypoints.openai.keys import Keyring
from quire.entrypoints.openai.lifecycle import HttpServer, Lifecycle
from quire.entrypoints.openai.processes.channel import Channel, open_channel
from quire.entrypoints.openai.processes.door import BackDoor
from quire.entrypoints.openai.processes.messages import (
    Adapters,
    Cancel,
    CoreLost,
    CoreStarted,
    Drain,
    EngineEnded,
    Hello,
    Message,
    Resting,
    Up,
)
from quire.entrypoints.openai.processes.pulse import beat
from quire.entrypoints.openai.state import ServerState
from quire.errors import QuireError
from quire.logging_setup import configure_logging
from quire.lora_request import LoRARequest
from quire.metrics.stats import IterationStats, StatLogger
from quire.scheduler.output import SchedulerStats

logger = logging.getLogger(__name__)


class MemberLifecycle(Lifecycle):
    """Does what the first process says, and says nothing itself that the first one says for all."""

    def __init__(self, state: ServerState, http: HttpServer, cores: BorrowedCores) -> None:
        super().__init__(state, http, socket.socket(), needs_key=False)
        self._cores = cores

    def take_in(self, message: Message) -> None:
        """Act on a word of the first process."""
        if isinstance(message, CoreStarted):
            self._cores.core_started(message.core, message.address)
        elif isinstance(message, CoreLost):
            self._cores.core_lost(message.core)
        elif isinstance(message, Resting):
            self._state.engine.rest(message.rest, dozes=message.dozes)
        elif isinstance(message, Adapters):
            self._state.adapters = message.served
        elif isinstance(message, EngineEnded):
            self._state.engine.end(message.reason)
        elif isinstance(message, Drain):
            self.on_signal()
        elif isinstance(message, Cancel):
            self.stop_now()

    def _handle_signals(self) -> None:
        """They are ignored from the beginning."""

    def _listeners(self) -> list[socket.socket]:
        return []

    def _tell_failed_start(self, error: QuireError) -> None:
        logger.info("the engine could not start: %s", error)

    async def _check_adapters(self) -> None:
        """The first process does."""

    def _tell_ready(self) -> None:
        """The server is ready when the first process is."""

    def _tell_end(self, error: QuireError) -> None:
        """The first process has told it."""

    async def _log_stats(self) -> None:
        """The first process does."""


class TokenCounts(StatLogger):
    """Writes to the ledger what was computed for this process's requests, for the first one's log."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        self._page.add(Column.COMPUTED_TOKENS, iteration.num_prompt_tokens - iteration.num_cached_tokens)
        self._page.add(Column.GENERATED_TOKENS, iteration.num_generation_tokens)


class First:
    """The first process, and through it all others."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def ask(self, question: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self._channel.ask(question, *args)
        return answers

    async def decide(self, decision: str, *args: Any) -> None:
        await self._channel.order(decision, *args)

    async def share_adapters(self, adapters: Mapping[str, LoRARequest]) -> None:
        raise AssertionError("the first process says which adapters are served")


class Membership:
    """This process, from the first word it hears to its exit code."""

    def __init__(self, hello: Hello, channel: Channel, door: socket.socket, ledger: IO[bytes]) -> None:
        num_cores = hello.engine.parallel.num_replicas
        page = Ledger(hello.num_pages, len(hello.tenants), ledger, num_cores).page(hello.page)
        cores = BorrowedCores(hello.engine, hello.front_end)
        census = SharedCensus(page, whole=bool(hello.server.max_connections))
        self._channel = channel
        self._page = page
        self._engine = AsyncLLM(hello.engine, cores=cores)
        self._engine.share(page)
        self._engine.add_stat_logger(TokenCounts(page))
        app = build_app(self._engine, hello.server, keys=Keyring(hello.tenants), page=page)
        self.state: ServerState = app.state.server
        self.state.siblings = First(channel)
        self._http = HttpServer(http_config(app, hello.server, census))
        self._back_door = _back_door(door, self._http, census)
        self.lifecycle = MemberLifecycle(self.state, self._http, cores)

    async def run(self) -> int:
        works = self._listen(), self._open(), beat(self._page)
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
            logger.error("the first API process is gone")
        finally:
            self.lifecycle.stop_now()

    async def _open(self) -> None:
        """Connections are welcome when their requests are; until then the first process says what there is to say."""
        await self._http.is_open.wait()
        self._back_door.open()
        with suppress(QuireError):  # the lifecycle meets it, too
            await self._engine.wait_ready()
            self._channel.tell(Up())


def _back_door(door: socket.socket, http: HttpServer, census: Census) -> BackDoor:
    return BackDoor(door, http.admit, census)


async def serve(channel_end: socket.socket, door: socket.socket, ledger: IO[bytes]) -> int:
    """Serve until the first process says otherwise, or ends; returns the exit code."""
    members: list[Membership] = []
    channel = await open_channel(
        channel_end,
        lambda question, *args: members[0].state.answer(question, *args),
        lambda message: members[0].lifecycle.take_in(message),
    )
    try:
        hello = await channel.read()
    except (asyncio.IncompleteReadError, OSError):
        return 1
    assert isinstance(hello, Hello)
    configure_logging(hello.engine.observability.log_level, hello.engine.observability.log_format)
    members.append(Membership(hello, channel, door, ledger))
    return await members[0].run()
