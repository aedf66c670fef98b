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
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn

from quire.entrypoints.openai.api_server import drain_signals
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.openai.welcome import base_url, ready_text
from quire.errors import EngineDeadError, QuireError
from quire.logging_setup import say, say_error
from quire.metrics.logging import LoggingStatLogger

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.2
GRACE_S = 5.0
"""How long answers that are ending may take to reach their clients."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: signals mean draining here, and that is our business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        logging_stats = asyncio.create_task(self._log_stats())
        try:
            ends = self._until_engine_ends(), self._until_drained(), _ended(serving)
            return await _first_of(*ends)
        finally:
            logging_stats.cancel()
            self._http.should_exit = True
            await asyncio.gather(serving, logging_stats, return_exceptions=True)

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
        except QuireError as error:
            say_error(f"error: {error}")
            return 1
        say(self._ready_text())
        while not engine.errored:  # noqa: ASYNC110  (the engine offers no event, and a poll costs nothing)
            await asyncio.sleep(POLL_S)
        logger.error(
            "the engine core has ended: %s", engine.dead_error or EngineDeadError("no reason is known")
        )
        await self._let_answers_end()
        return 1

    async def _until_drained(self) -> int:
        await self._drain.wait()
        self._state.draining = True
        in_flight, patience = self._state.in_flight, self._state.config.shutdown_timeout
        logger.info("draining: %d requests in progress, up to %g s", len(in_flight), patience)
        await _first_of(in_flight.wait_idle(), _event(self._cancel), asyncio.sleep(patience))
        if len(in_flight):
            logger.warning("cancelling %d requests that are still in progress", len(in_flight))
            in_flight.cancel_all()
            await self._let_answers_end()
        return 0

    async def _let_answers_end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._state.in_flight.wait_idle()

    async def _log_stats(self) -> None:
        options = self._state.engine.config.observability
        if options.disable_log_stats:
            return
        stats = LoggingStatLogger()
        self._state.engine.add_stat_logger(stats)
        while True:
            await asyncio.sleep(options.log_stats_interval)
            stats.log()

    def _ready_text(self) -> str:
        config, tokenizer = self._state.config, self._state.engine.tokenizer
        has_template = tokenizer is not None and bool(config.chat_template or tokenizer.chat_template)
        url = base_url(config.host, self._listener.getsockname()[1], config.root_path)
        return ready_text(url, self._state.model_names[0], needs_key=self._needs_key, has_chat=has_template)


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
