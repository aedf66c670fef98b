"""From the bound port to the exit code.

Invariant: the first SIGTERM, SIGINT or SIGHUP drains: work in progress may finish, new work is refused, exit code 0.
A second one, SIGQUIT, or the end of the patience, cancels what is left; its streams end in an error event. When the
engine dies, its streams have ended in an error event before the process ends, with exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn

from quire.entrypoints.openai.start_signals import drain_signals
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.openai.welcome import base_url, greeting_of, reaches_others, ready_text
from quire.errors import EngineDeadError, QuireError
from quire.logging_setup import say, say_error
from quire.metrics.logging import LoggingStatLogger
from quire.metrics.stats import IterationStats

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.2
GRACE_S = 5.0
"""How long answers that are ending may take to reach their clients."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: signals mean draining here, and that is our business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_open = asyncio.Event()
        self._arriving: set[asyncio.Task[Any]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_open.set()

    def admit(self, connection: socket.socket) -> None:
        """Serve a connection that has been accepted elsewhere; to be called once the server is open."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted = asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        task = asyncio.create_task(accepted)
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    def _make_protocol(self) -> asyncio.Protocol:
        state = self.lifespan.state
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=state)


class Lifecycle:
    """Runs one server until a signal or the engine ends it; the caller then shuts the engine down."""

    def __init__(
        self, state: ServerState, http: HttpServer, listener: socket.socket, *, needs_key: bool
    ) -> None:
        self._state = state
        self._http = http
        self._listener = listener
        self._needs_key = needs_key
        self._drain = asyncio.Event()
        self._cancel = asyncio.Event()

    async def run(self) -> int:
        """Serve; returns the process's exit code."""
        self._handle_signals()
        serving = asyncio.create_task(self._http.serve(sockets=self._listeners()))
        logging_stats = asyncio.create_task(self._log_stats())
        try:
            ends = self._until_engine_ends(), self._until_drained(), _ended(serving)
            return await _first_of(*ends)
        finally:
            logging_stats.cancel()
            self._stop_accepting()
            self._http.should_exit = True
            await asyncio.gather(serving, logging_stats, return_exceptions=True)

    # What another process of a server does in another way

    def _listeners(self) -> list[socket.socket]:
        """Where this process accepts connections itself."""
        return [self._listener]

    def _stop_accepting(self) -> None:
        """The HTTP server ends, and with it what it accepts itself."""

    def _tell_failed_start(self, error: QuireError) -> None:
        say_error(f"error: {error}")

    async def _check_adapters(self) -> None:
        """Raises ConfigError: the server was given some that cannot be used."""
        await self._state.adapter_changes.check_all()

    def _tell_ready(self) -> None:
        say(self._ready_text())
        host = self._state.config.host
        if not self._needs_key and reaches_others(host):
            logger.warning(
                "listening on %s without a key: whoever reaches this machine can use the server (--api-key)",
                host or "all addresses",
            )

    def _tell_end(self, error: QuireError) -> None:
        logger.error("the engine core has ended: %s", error)

    def _begin_draining(self) -> None:
        self._state.draining = True
        patience = self._state.config.shutdown_timeout
        logger.info("draining: %d requests in progress, up to %g s", len(self._state.in_flight), patience)

    async def _wait_idle(self) -> None:
        """Until nobody waits for an answer."""
        await self._state.in_flight.wait_idle()

    def _cancel_all(self) -> None:
        if len(self._state.in_flight):
            logger.warning("cancelling %d requests that are still in progress", len(self._state.in_flight))
            self._state.in_flight.cancel_all()

    def _elsewhere(self) -> IterationStats | None:
        """What other processes have done since this was asked last, for the log."""
        return None

    # The life

    def on_signal(self) -> None:
        """First call: drain. Second call: cancel."""
        if self._drain.is_set():
            self._cancel.set()
        self._drain.set()

    def stop_now(self) -> None:
        """Cancel at once."""
        self._cancel.set()
        self._drain.set()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in drain_signals():
            loop.add_signal_handler(number, self.on_signal)
        loop.add_signal_handler(signal.SIGQUIT, self.stop_now)

    async def _until_engine_ends(self) -> int:
        engine = self._state.engine
        try:
            await self._state.prepare()
            await engine.wait_ready()
            await self._check_adapters()
        except QuireError as error:
            self._tell_failed_start(error)
            return 1
        self._tell_ready()
        while not engine.errored:  # noqa: ASYNC110  (the engine offers no event, and a poll costs nothing)
            await asyncio.sleep(POLL_S)
        self._tell_end(engine.dead_error or EngineDeadError("no reason is known"))
        await self._let_answers_end()
        self._cancel_all()  # those that have yet to meet the engine
        await self._let_answers_end()
        return 1

    async def _until_drained(self) -> int:
        await self._drain.wait()
        self._begin_draining()
        patience = asyncio.sleep(self._state.config.shutdown_timeout)
        await _first_of(self._wait_idle(), _event(self._cancel), patience)
        self._cancel_all()
        await self._let_answers_end()
        return 0

    async def _let_answers_end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._wait_idle()

    async def _log_stats(self) -> None:
        options = self._state.engine.config.observability
        if options.disable_log_stats:
            return
        stats = LoggingStatLogger()
        self._state.engine.add_stat_logger(stats)
        while True:
            await asyncio.sleep(options.log_stats_interval)
            if (elsewhere := self._elsewhere()) is not None:
                stats.record(elsewhere, None, 0)
            stats.log()

    def _ready_text(self) -> str:
        config = self._state.config
        url = base_url(config.host, self._listener.getsockname()[1], config.root_path)
        greeting = greeting_of(self._state.engine.config.pooling, has_chat=self._state.form.has_chat)
        return ready_text(url, self._state.model_names[0], greeting, needs_key=self._needs_key)


async def _event(event: asyncio.Event) -> None:
    await event.wait()


async def _ended(serving: asyncio.Task[None]) -> int:
    """The HTTP server ends by itself only if it could not start; uvicorn has logged why."""
    await asyncio.wait({serving})
    return 1


async def _first_of(*works: Coroutine[Any, Any, T]) -> T:
    """The result of whichever ends first; the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
