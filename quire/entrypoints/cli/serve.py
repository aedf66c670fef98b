"""`quire serve`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

import click

from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.cli.options import EngineCommand, engine_config, server_config
from quire.errors import StartupError
from quire.logging_setup import say_error


@click.command(cls=EngineCommand, more_configs=(ServerConfig,))
@click.argument("model_argument", metavar="[MODEL]", required=False)
@click.pass_context
def serve(ctx: click.Context, /, model_argument: str | None, **params: Any) -> int:
    """Serve MODEL over HTTP.

    MODEL is a directory, a GGUF file or a Hugging Face id; without one, quire-demo, the toy in the box.
    """
    params["model"] = _one_model(ctx, model_argument, params["model"])
    engine, server = engine_config(params), server_config(params)
    if server.headless:
        return _bring_ranks(engine)

    from quire.entrypoints.openai.api_server import run_server

    return run_server(engine, server)


def _bring_ranks(config: EngineConfig) -> int:
    """Serve nothing over HTTP, and give this host's ranks to the server of another one."""
    from quire.engine.startup import prepare
    from quire.executor.headless import run_headless

    try:
        return run_headless(prepare(config, "headless"))
    except StartupError as error:
        say_error(f"error: {error}")
        return 1


def _one_model(ctx: click.Context, argument: str | None, option: str | None) -> str | None:
    """The model named by position or by flag; a config file's model yields to both."""
    flag_given = ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
    if argument is not None and flag_given and argument != option:
        raise click.UsageError(f"two models are named, MODEL {argument} and --model {option}; name one")
    return argument if argument is not None else option
