# SPDX-License-Identifier: Apache-2.0
"""Server start-up; also `python -m quire.entrypoints.openai.api_server --model M ...`.

Invariant: the order is bind, start the engine core's process, import the web framework. So a port in use fails before
the model loads, probes during loading get 503 instead of a refused connection, and imports overlap with loading.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.openai.service_manager import ServiceManager
from quire.entrypoints.openai.start_signals import StartSignals
from quire.entrypoints.openai.tls import checked_tls
from quire.errors import ConfigError, StartupError
from quire.logging_setup import say_failure
from quire.processes import freeze_garbage, leave, uncollected
from quire.unix_sockets import listen_unix
from quire.vllm_names.imports import attributes_of

if TYPE_CHECKING:
    from quire.engine.tokenizer import Tokenizer

BACKLOG = 2048  # Connections that may wait to be accepted.


def run_server(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal or until the engine stops; return the process's exit code."""
    service_manager = ServiceManager.adopt(os.environ)
    try:
        server_config = checked_tls(server_config)
        with (
            StartSignals() as signals,
            listen(server_config) as listener,
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            return runner.run(_serve(engine_config, server_config, listener, signals, service_manager))
    except StartupError as error:
        return say_failure(error)
    return 0  # a signal came before there was anything to drain


def listen(config: ServerConfig) -> socket.socket:
    """Return a listening socket at --uds, else at --host and --port.

    Raises:
        StartupError: the address cannot be used.
    """
    if config.uds is None:
        return bind(config.host, config.port)
    try:
        return listen_unix(config.uds, BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise StartupError(f"cannot listen on --uds {config.uds}: {reason}; choose another path") from None


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; `::` also accepts IPv4 where the system supports it.

    Raises:
        StartupError: the address is in use or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_both)
    except (OSError, OverflowError) as error:
        # Python appends the address, which the message has anyhow.
        reason = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        raise StartupError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from None


async def _serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    listener: socket.socket,
    signals: StartSignals,
    service_manager: ServiceManager,
) -> int:
    from quire.engine.async_llm import AsyncLLM
    from quire.entrypoints.openai.adapter_serving import adapter_serving
    from quire.entrypoints.openai.keys import make_keyring, with_keys_of_environment

    server_config = with_keys_of_environment(server_config)  # before other processes are started
    if server_config.api_server_count > 1 and engine_config.parallel.remote_replicas:
        raise ConfigError(
            f"--api-server-count is {server_config.api_server_count}, which wants all replicas on this host: "
            "--data-parallel-size-local is less than --data-parallel-size"
        )
    engine_config = make_keyring((), server_config.api_key_file).weighted(engine_config)
    engine = AsyncLLM.start(engine_config)
    try:
        # Imported while the core process loads the model: together these imports take most of a second.
        if server_config.api_server_count > 1:
            from quire.entrypoints.openai.processes.supervisor import serve_supervisor

            server_config = adapter_serving().with_absolute_paths(server_config)
            server_config = with_template(server_config, engine.tokenizer)
            signals.check()
            return await serve_supervisor(engine, server_config, listener, service_manager)

        with uncollected():
            from quire.entrypoints.openai.app import build_app
            from quire.entrypoints.openai.connection import http_config
            from quire.entrypoints.openai.lifecycle import HttpServer, Lifecycle

            app = build_app(engine, server_config)
        http = HttpServer(http_config(app, server_config), server_config)
        needs_key = bool(app.state.server.keys)
        freeze_garbage()
        signals.check()
        lifecycle = Lifecycle(
            app.state.server, http, listener, needs_key=needs_key, service_manager=service_manager
        )
        return await lifecycle.run()
    finally:
        await engine.shutdown()


def with_template(config: ServerConfig, tokenizer: Tokenizer | None) -> ServerConfig:
    """Return the config with its chat template's text inlined, so that other processes need not read the file.

    Raises:
        ConfigError: the file does not exist.
    """
    from quire.entrypoints.chat.template import read_template

    given, named = config.chat_template, tokenizer.chat_templates if tokenizer else {}
    if given is None or given in named:
        return config
    text = read_template(given, named)
    if "{" not in text and "\n" not in text:  # would be mistaken for a file name
        text = str(Path(given).absolute())
    return replace(config, chat_template=text)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory if uvloop is installed (it does not support Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__)  # vLLM's names that are absent

if __name__ == "__main__":
    from quire.entrypoints.cli.main import main

    leave(main(["serve", *sys.argv[1:]]))
