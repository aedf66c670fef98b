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

    MODEL is a directory, a GGUF file or a Hugging Face id; without one, the bundled demo model quire-demo.
    """
    params["model"] = _model_name(ctx, model_argument, params["model"])
    engine, server = engine_config(params), server_config(params)
    if server.headless:
        return _run_headless(engine)
    _check_formats(server)

    from quire.entrypoints.openai.api_server import run_server

    return run_server(engine, server)


def _check_formats(config: ServerConfig) -> None:
    """Check what needs no model, so that a mistake costs no loading of one.

    Raises:
        ConfigError: a parser is unknown, or the chat template is the name of a file that cannot be read.
    """
    from quire.entrypoints.chat.formats.selection import choose
    from quire.entrypoints.chat.template import read_template

    choose(config.tool_call_parser, config.reasoning_parser, None)
    template = config.chat_template
    if template is not None and (
        "/" in template or "." in template
    ):  # not a template's name in the checkpoint
        read_template(template)


def _run_headless(config: EngineConfig) -> int:
    """Run this host's replicas, or ranks, for the server on another host, without HTTP."""
    from quire.engine.replicas.replica_host import run_remote_replicas
    from quire.engine.startup import prepare
    from quire.executor.ranks.multiproc import run_headless

    try:
        prepared = prepare(config, "headless")
        return (
            run_remote_replicas(prepared)
            if prepared.parallel.data_parallel_size > 1
            else run_headless(prepared)
        )
    except (StartupError, EngineDeadError) as error:
        say_error(f"error: {error}")
        return 1


def _model_name(ctx: click.Context, argument: str | None, option: str | None) -> str | None:
    """Return the model given by position or flag, which both override a config file's."""
    flag_given = ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
    if argument is not None and flag_given and argument != option:
        raise click.UsageError(f"two models are named, MODEL {argument} and --model {option}; name one")
    return argument if argument is not None else option
