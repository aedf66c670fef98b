# SPDX-License-Identifier: Apache-2.0
"""`quire serve --models`: from the flags to the exit code.

Invariant: the first SIGTERM, SIGINT or SIGHUP drains: what waits is refused, what runs may finish within
--shutdown-timeout, then the models' servers end. A second signal or SIGQUIT cancels what runs. The exit code is then 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry

from quire import private_directories
from quire.config import ModelRouterConfig, ServerConfig
from quire.entrypoints.openai.api_server import listen, loop_factory
from quire.entrypoints.openai.connection import http_config
from quire.entrypoints.openai.greeting import base_url, reaches_others
from quire.entrypoints.openai.keys import with_keys_of_environment
from quire.entrypoints.openai.lifecycle import GRACE_S, HttpServer
from quire.entrypoints.openai.service_manager import ServiceManager
from quire.entrypoints.openai.start_signals import StartSignals, drain_signals
from quire.errors import StartupError
from quire.logging_setup import say, say_failure
from quire.model_router.app import RouterApp
from quire.model_router.child import ServerStarter, Starter
from quire.model_router.flags import server_flags
from quire.model_router.memory import estimate
from quire.model_router.metrics import RouterMetrics
from quire.model_router.models_file import Models
from quire.model_router.planner import MIB, PlannerLimits, RouterPlanner
from quire.model_router.router import ModelRouter, RouterSettings, rules_of
from quire.platforms import Host
from quire.processes import freeze_garbage

logger = logging.getLogger(__name__)


def run_router(
    models: Models,
    config: ServerConfig,
    settings: ModelRouterConfig,
    *,
    read: Callable[[], Models],
    json_log: bool,
) -> int:
    """Serve until a signal; return the process's exit code.

    Args:
        read: returns the models when a client asks for them to be read again; raises ConfigError.
    """
    service_manager = ServiceManager.adopt(os.environ)
    try:
        with (
            StartSignals() as signals,
            listen(config) as listener,
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            directory = private_directories.make("models-")
            try:
                starter = ServerStarter(directory, prefixes_log=not json_log)
                return runner.run(
                    _serve(models, read, config, settings, listener, starter, signals, service_manager)
                )
            finally:
                private_directories.remove(directory)
    except StartupError as error:
        return say_failure(error)
    return 0  # a signal came before there was anything to drain


async def _serve(
    models: Models,
    read: Callable[[], Models],
    config: ServerConfig,
    settings: ModelRouterConfig,
    listener: socket.socket,
    starter: Starter,
    signals: StartSignals,
    service_manager: ServiceManager,
) -> int:
    config = with_keys_of_environment(config)  # before other processes are started
    registry = CollectorRegistry()
    router = make_router(models, config, settings, starter, registry)
    app = RouterApp(router, config, settings, registry, read)
    http = HttpServer(http_config(app.build(), config), config)
    freeze_garbage()
    signals.check()
    _report(models, config, listener, has_keys=bool(app.keys))
    return await RouterLifecycle(app, http, listener, service_manager).run()


def make_router(
    models: Models,
    config: ServerConfig,
    settings: ModelRouterConfig,
    starter: Starter,
    registry: CollectorRegistry,
    host: Host | None = None,
) -> ModelRouter:
    """Return the owner of the models; the memory for them is what the machine can give now, unless it is set."""
    host = host or Host()
    limit_bytes = settings.models_memory or host.available_bytes()
    logger.info("memory for models: %.0f MiB", limit_bytes / MIB)
    limits = PlannerLimits(
        memory_bytes=limit_bytes,
        max_loaded=settings.models_max,
        wait_timeout_s=settings.models_wait_timeout,
        turn_s=settings.models_turn,
        max_waiting=settings.models_max_waiting,
    )
    return ModelRouter(
        models,
        RouterPlanner({name: rules_of(entry) for name, entry in models.entries.items()}, limits),
        start=starter,
        measure=partial(estimate, limit_bytes=limit_bytes),
        flags=partial(server_flags, config=config),
        available_bytes=host.available_bytes,
        metrics=RouterMetrics(registry),
        settings=RouterSettings(
            settings.models_load_timeout, config.shutdown_timeout, keeps_spare=settings.models_spare
        ),
    )


def _report(models: Models, config: ServerConfig, listener: socket.socket, *, has_keys: bool) -> None:
    if config.uds is not None:
        where = f"unix:{config.uds}"
    else:
        where = base_url(config.host, listener.getsockname()[1], config.root_path)
    say(f"\n{len(models.entries)} models are served at {where}: {', '.join(models.entries)}\n")
    if not has_keys and config.uds is None and reaches_others(config.host):
        logger.warning(
            "listening on %s without a key: any machine that reaches it can use the server", config.host
        )


class RouterLifecycle:
    """Runs the HTTP server and the models until a signal."""

    def __init__(
        self, app: RouterApp, http: HttpServer, listener: socket.socket, service_manager: ServiceManager
    ) -> None:
        self._app = app
        self._service_manager = service_manager
        self._http = http
        self._listener = listener
        self._drain = asyncio.Event()
        self._cancel = asyncio.Event()

    async def run(self) -> int:
        """Serve; return the process's exit code."""
        loop = asyncio.get_running_loop()
        for number in drain_signals():
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGQUIT, self._stop_now)
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        draining = asyncio.create_task(self._drain.wait())
        watchdog = asyncio.create_task(self._service_manager.keep_alive(lambda: True))
        self._app.router.open()
        self._service_manager.ready("serving models on demand")
        try:
            await asyncio.wait({serving, draining}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return 1  # it could not start; uvicorn has logged why
            await self._finish()
            return 0
        finally:
            draining.cancel()
            watchdog.cancel()
            await self._app.router.close()
            self._http.should_exit = True
            await asyncio.gather(serving, watchdog, return_exceptions=True)

    def _on_signal(self) -> None:
        if self._drain.is_set():
            self._cancel.set()
        self._drain.set()

    def _stop_now(self) -> None:
        self._cancel.set()
        self._drain.set()

    async def _finish(self) -> None:
        """Let the requests in progress finish, then cancel the rest."""
        app = self._app
        app.draining = True
        self._service_manager.stopping("draining")
        patience_s = app.config.shutdown_timeout
        logger.info("draining: %d requests in progress, up to %g s", len(app.in_flight), patience_s)
        app.router.drain()
        idle = asyncio.create_task(app.in_flight.wait_idle())
        cancelled = asyncio.create_task(self._cancel.wait())
        await asyncio.wait({idle, cancelled}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            logger.warning("cancelling %d requests that are still in progress", len(app.in_flight))
            app.router.cancel_requests()
            await asyncio.wait({idle}, timeout=GRACE_S)
            app.in_flight.cancel_all()
        idle.cancel()
        cancelled.cancel()
