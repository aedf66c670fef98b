"""Starts the server; also `python -m quire.entrypoints.openai.api_server --model M ...`.

Invariant: the order is bind, start the engine core's process, import the web framework. A port that is taken
costs no model load, a probe during loading gets 503 instead of a refused connection, and the core loads while
this process imports.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.openai.start_signals import StartSignals
from quire.errors import ConfigError, StartupError
from quire.log_format import hide_queries
from quire.logging_setup import say_error
from quire.processes import settle_garbage

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from quire.engine.tokenizer import Tokenizer
    from quire.entrypoints.openai.census import Census

MAX_HEADER_BYTES = 64 * 2**10
KEEP_ALIVE_S = 5
GRACEFUL_SHUTDOWN_S = 5


def run_server(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal or the engine ends it; returns the process's exit code."""
    try:
        with (
            StartSignals() as signals,
            bind(server_config.host, server_config.port) as listener,
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            return runner.run(_serve(engine_config, server_config, listener, signals))
    except StartupError as error:
        say_error(f"error: {error}")
        return 1
    return 0  # a signal came before there was anything to drain


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; `::` means IPv4, too, where the system can do both.

    Raises:
        ConfigError: the address is taken or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=is_both)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from None


async def _serve(
    engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket, signals: StartSignals
) -> int:
    from quire.engine.async_llm import AsyncLLM
    from quire.entrypoints.openai.adapters import with_absolute_paths
    from quire.entrypoints.openai.keys import make_keyring, with_keys_of_environment

    server_config = with_keys_of_environment(server_config)  # before there are other processes
    if server_config.api_server_count > 1 and engine_config.parallel.guests:
        raise ConfigError(
            f"--api-server-count is {server_config.api_server_count}, which wants all replicas on this host: "
            "--data-parallel-size-local is less than --data-parallel-size"
        )
    engine_config = make_keyring((), server_config.api_key_file).weighted(engine_config)
    engine = AsyncLLM.start(engine_config)
    try:
        # Imported while the core's process loads the model: together they take most of a second.
        if server_config.api_server_count > 1:
            from quire.entrypoints.openai.processes.first import serve_first

            server_config = with_template(with_absolute_paths(server_config), engine.tokenizer)
            signals.check()
            return await serve_first(engine, server_config, listener)

        from quire.entrypoints.openai.app import build_app
        from quire.entrypoints.openai.lifecycle import HttpServer, Lifecycle

        app = build_app(engine, server_config)
        http = HttpServer(http_config(app, server_config))
        needs_key = bool(app.state.server.keys)
        settle_garbage()
        signals.check()
        return await Lifecycle(app.state.server, http, listener, needs_key=needs_key).run()
    finally:
        await engine.shutdown()


def with_template(config: ServerConfig, tokenizer: Tokenizer | None) -> ServerConfig:
    """Return the config with the text of its chat template, which no other process must read from the file again.

    Raises:
        ConfigError: there is no such file.
    """
    from quire.entrypoints.chat.template import read_template

    given, named = config.chat_template, tokenizer.chat_templates if tokenizer else {}
    if given is None or given in named:
        return config
    text = read_template(given, named)
    if "{" not in text and "\n" not in text:  # it would be taken for a file's name
        text = str(Path(given).absolute())
    return replace(config, chat_template=text)


def http_config(app: FastAPI, config: ServerConfig, census: Census | None = None) -> uvicorn.Config:
    """uvicorn's settings. On h11, because it bounds the size of the headers and refuses ambiguous ones."""
    import uvicorn

    from quire.entrypoints.openai.census import Census
    from quire.entrypoints.openai.connection import protocol_class
    from quire.entrypoints.openai.hosts import AllowedHosts

    hide_queries()
    return uvicorn.Config(
        app,
        http=protocol_class(
            config, census or Census(), AllowedHosts(config, has_keys=bool(app.state.server.keys))
        ),  # type: ignore[arg-type]
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


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; it is not for Windows."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    from quire.entrypoints.cli.main import main

    sys.exit(main(["serve", *sys.argv[1:]]))
