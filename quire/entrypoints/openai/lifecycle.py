# SPDX-License-Identifier: Apache-2.0
"""Server lifecycle from the bound port to the exit code.

Invariant: the first SIGTERM, SIGINT or SIGHUP drains: running requests may finish, new ones are rejected, exit code 0.
A second signal, SIGQUIT or --shutdown-timeout cancels the rest; their streams end in an error event. When the engine
dies, its streams end in an error event before the process exits with code 1.
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

from quire.config import ServerConfig
from quire.entrypoints.openai.greeting import base_url, greeting_of, reaches_others, ready_text
from quire.entrypoints.openai.service_manager import ServiceManager
from quire.entrypoints.openai.start_signals import drain_signals
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.openai.tls import CertificateRenewal
from quire.errors import EngineDeadError, QuireError
from quire.logging_setup import say, say_failure
from quire.metrics.logging import LoggingStatLogger
from quire.metrics.stats import IterationStats

logger = logging.getLogger(__name__)


T = TypeVar("T")
POLL_S = 0.2
GRACE_S = 5.0  # Time for ending responses to reach their clients.


class HttpServer(uvicorn.Server):
    """uvicorn server without its signal handlers; signals drain here (`Lifecycle`)."""

    def __init__(self, config: uvicorn.Config, server_config: ServerConfig) -> None:
        super().__init__(config)
        self.is_open = asyncio.Event()
        self._server_config = server_config
        self._arriving: set[asyncio.Task[Any]] = set()
        self.renewal: CertificateRenewal | None = None  # Once the server has opened, if it is asked for.
        self._renewing: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._server_config.enable_ssl_refresh and self.config.ssl is not None:
            self.renewal = CertificateRenewal(self._server_config, self.config.ssl)
            self._renewing = asyncio.create_task(self.renewal.run())
        self.is_open.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        await super().shutdown(sockets)

    def admit(self, connection: socket.socket) -> None:
        """Serve a connection accepted others; call after the server has opened."""
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.create_task(self._accept(connection))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _accept(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(self._make_protocol, connection, ssl=self.config.ssl)
        except OSError as error:  # the TLS handshake failed, and its client knows
            logger.debug("a connection was not accepted: %s", error)

    def _make_protocol(self) -> asyncio.Protocol:
        state = self.lifespan.state
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=state)


class Lifecycle:
    """Runs one server until a signal, or until the engine stops; the caller then shuts the engine down."""

    def __init__(
        self,
        state: ServerState,
        http: HttpServer,
        listener: socket.socket,
        *,
        needs_key: bool,
        service_manager: ServiceManager | None = None,
    ) -> None:
        self._state = state
        self._http = http
        self._listener = listener
        self._needs_key = needs_key
        self._service_manager = service_manager or ServiceManager()
        self._drain = asyncio.Event()
        self._cancel = asyncio.Event()

    async def run(self) -> int:
        """Serve; return the process's exit code."""
        self._handle_signals()
        serving = asyncio.create_task(self._http.serve(sockets=self._listeners()))
        logging_stats = asyncio.create_task(self._log_stats())
        watchdog = asyncio.create_task(self._service_manager.keep_alive(self._is_alive))
        try:
            ends = self._until_engine_stops(), self._until_drained(), _ended(serving)
            return await _first_of(*ends)
        finally:
            logging_stats.cancel()
            watchdog.cancel()
            self._stop_accepting()
            self._http.should_exit = True
            await asyncio.gather(serving, logging_stats, watchdog, return_exceptions=True)
            self._state.close()

    # Overridden where there are several API processes

    def _listeners(self) -> list[socket.socket]:
        """Return the sockets on which this process accepts connections."""
        return [self._listener]

    def _stop_accepting(self) -> None:
        """Stop accepting connections; a no-op here, because the HTTP server closes its own sockets."""

    def _report_failed_start(self, error: QuireError) -> int:
        """Print the reason; returns the exit code."""
        return say_failure(error)

    async def _check_adapters(self) -> None:
        """Check the configured adapters.

        Raises:
            ConfigError: an adapter cannot be used.
        """
        await self._state.adapter_changes.check_all()

    def _report_ready(self) -> None:
        say(self._ready_text())
        self._service_manager.ready(f"serving {', '.join(self._state.model_names)}")
        host = self._state.config.host
        if not self._needs_key and self._state.config.uds is None and reaches_others(host):
            logger.warning(
                "listening on %s without a key: any machine that reaches it can use the server; set --api-key",
                host or "all addresses",
            )

    def _report_engine_end(self, error: QuireError) -> None:
        logger.error("the engine core has ended: %s", error)

    def _begin_draining(self) -> None:
        self._state.draining = True
        self._service_manager.stopping("draining")
        patience = self._state.config.shutdown_timeout
        logger.info("draining: %d requests in progress, up to %g s", len(self._state.in_flight), patience)

    async def _wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._state.in_flight.wait_idle()

    def _cancel_all(self) -> None:
        if len(self._state.in_flight):
            logger.warning("cancelling %d requests that are still in progress", len(self._state.in_flight))
            self._state.in_flight.cancel_all()

    def _other_processes_stats(self) -> IterationStats | None:
        """Return what other processes computed since the last call, for the log."""
        return None

    # Lifecycle

    def on_signal(self) -> None:
        """First call: drain. Second call: cancel."""
        if self._drain.is_set():
            self._cancel.set()
        self._drain.set()

    def stop_now(self) -> None:
        """Cancel immediately."""
        self._cancel.set()
        self._drain.set()

    def _is_alive(self) -> bool:
        """Return whether the engine loads, computes or idles, as `/livez` does."""
        return not (self._state.engine.errored or self._state.engine.stalls)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in drain_signals():
            loop.add_signal_handler(number, self.on_signal)
        loop.add_signal_handler(signal.SIGQUIT, self.stop_now)

    async def _until_engine_stops(self) -> int:
        engine = self._state.engine
        try:
            await self._state.prepare()
            await engine.wait_ready()
            await self._check_adapters()
        except QuireError as error:
            return self._report_failed_start(error)
        self._state.media.warm_up()
        self._report_ready()
        while not engine.errored:  # noqa: ASYNC110  (the engine offers no event, and a poll costs nothing)
            await asyncio.sleep(POLL_S)
        self._report_engine_end(engine.dead_error or EngineDeadError("no reason is known"))
        await self._finish_responses()
        self._cancel_all()  # requests that have not reached the engine yet
        await self._finish_responses()
        return 1

    async def _until_drained(self) -> int:
        await self._drain.wait()
        self._begin_draining()
        patience = asyncio.sleep(self._state.config.shutdown_timeout)
        await _first_of(self._wait_idle(), _event(self._cancel), patience)
        self._cancel_all()
        await self._finish_responses()
        return 0

    async def _finish_responses(self) -> None:
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
            if (others := self._other_processes_stats()) is not None:
                stats.record(others, None, 0)
            stats.log()

    def _ready_text(self) -> str:
        config = self._state.config
        if config.uds is not None:
            return f"\n{self._state.model_names[0]} is ready at unix:{config.uds}\n"
        url = base_url(config.host, self._listener.getsockname()[1], config.root_path, config.scheme)
        greeting = greeting_of(self._state.engine.config.pooling, has_chat=self._state.form.has_chat)
        return ready_text(url, self._state.model_names[0], greeting, needs_key=self._needs_key)


async def _event(event: asyncio.Event) -> None:
    await event.wait()


async def _ended(serving: asyncio.Task[None]) -> int:
    """Wait for the HTTP server, which ends by itself only if it could not start; uvicorn has logged why."""
    await asyncio.wait({serving})
    return 1


async def _first_of(*works: Coroutine[Any, Any, T]) -> T:
    """Return the result of the first to end; the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
