"""`quire serve`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

import click

from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.cli.options import EngineCommand, engine_config, server_config
from quire.errors import EngineDeadError, StartupError
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
        return _help_another(engine)

    from quire.entrypoints.openai.api_server import run_server

    return run_server(engine, server)


def _help_another(config: EngineConfig) -> int:
    """Serve nothing over HTTP, and give this host's replicas, or ranks, to the server of another one."""
    from quire.engine.guest_host import run_guests
    from quire.engine.startup import prepare
    from quire.executor.headless import run_headless

    try:
        prepared = prepare(config, "headless")
        return run_guests(prepared) if prepared.parallel.data_parallel_size > 1 else run_headless(prepared)
    except (StartupError, EngineDeadError) as error:
        say_error(f"error: {error}")
        return 1


def _one_model(ctx: click.Context, argument: str | None, option: str | None) -> str | None:
    """The model named by position or by flag; a config file's model yields to both."""
    flag_given = ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
    if argument is not None and flag_given and argument != option:
        raise click.UsageError(f"two models are named, MODEL {argument} and --model {option}; name one")
    return argument if argument is not None else option
