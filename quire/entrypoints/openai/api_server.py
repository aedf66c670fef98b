"""Starts the server; also `python -m quire.entrypoints.openai.api_server --model M ...`.

Invariant: the order is bind, start the engine core's process, import the web framework. A port that is taken
costs no model load, a probe during loading gets 503 instead of a refused connection, and the core loads while
this process imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError, StartupError
from quire.log_format import hide_queries
from quire.logging_setup import say_error

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

MAX_HEADER_BYTES = 64 * 2**10
KEEP_ALIVE_S = 5
GRACEFUL_SHUTDOWN_S = 5


def run_server(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal or the engine ends it; returns the process's exit code."""
    try:
        with (
            _signals_as_interrupt(),
            bind(server_config.host, server_config.port) as listener,
            asyncio.Runner(loop_factory=_loop_factory()) as runner,
        ):
            return runner.run(_serve(engine_config, server_config, listener))
    except StartupError as error:
        say_error(f"error: {error}")
        return 1
    except KeyboardInterrupt:  # a signal before there was anything to drain
        return 0


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address is taken or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from None


def drain_signals() -> list[signal.Signals]:
    """Those that end the server once its work is done; a closed terminal's only without `nohup`, which ignores it."""
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    return signals if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else signals[:2]


@contextlib.contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """Until the lifecycle takes the signals over, all raise KeyboardInterrupt; at the end all is as it was."""
    signals = (*drain_signals(), signal.SIGQUIT)
    previous = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def _serve(engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket) -> int:
    from quire.engine.async_llm import AsyncLLM
    from quire.entrypoints.openai.keys import make_keyring

    engine_config = make_keyring((), server_config.api_key_file).weighted(engine_config)
    engine = AsyncLLM.start(engine_config)
    try:
        # Imported while the core's process loads the model: together they take most of a second.
        from quire.entrypoints.openai.app import build_app
        from quire.entrypoints.openai.lifecycle import HttpServer, Lifecycle

        app = build_app(engine, server_config)
        http = HttpServer(http_config(app, server_config))
        needs_key = bool(app.state.server.keys)
        settle_garbage()
        return await Lifecycle(app.state.server, http, listener, needs_key=needs_key).run()
    finally:
        await engine.shutdown()


def settle_garbage() -> None:
    """What has been imported and made by now stays: the collector need not walk over it again and again, which takes
    tens of milliseconds that every stream would wait for."""
    gc.collect()
    gc.freeze()


def http_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """uvicorn's settings. On h11, because it bounds the size of the headers and refuses ambiguous ones."""
    import uvicorn

    from quire.entrypoints.openai.connection import protocol_class

    hide_queries()
    return uvicorn.Config(
        app,
        http=protocol_class(config),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        root_path=config.root_path,
        log_config=None,  # it would write to pipes that may be full, or have nobody at their end
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        server_header=False,
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; it is not for Windows."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    from quire.entrypoints.cli.main import main

    sys.exit(main(["serve", *sys.argv[1:]]))
