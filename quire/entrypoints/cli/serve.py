# SPDX-License-Identifier: Apache-2.0
"""`quire serve`: the OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import click

from quire.config import EngineConfig, ModelRouterConfig, ServerConfig
from quire.config.fields import flag_of
from quire.entrypoints.cli.options import EngineCommand, engine_config, router_config, server_config
from quire.errors import ConfigError, EngineDeadError, StartupError
from quire.logging_setup import say_failure


@click.command(cls=EngineCommand, more_configs=(ServerConfig, ModelRouterConfig))
@click.argument("model_argument", metavar="[MODEL]", required=False)
@click.pass_context
def serve(ctx: click.Context, /, model_argument: str | None, **params: Any) -> int:
    """Serve MODEL over HTTP.

    MODEL is a directory, a GGUF file or a Hugging Face id; without one, the bundled demo model quire-demo.
    """
    if params["models"] is not None:
        return _run_router(ctx, model_argument, params)
    _check_one_model(params)
    params["model"] = _model_name(ctx, model_argument, params["model"])
    engine, server = engine_config(params), server_config(params)
    if server.headless:
        return _run_headless(engine)
    _check_formats(server)
    _check_adapters(engine, server)

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


def _check_adapters(engine: EngineConfig, server: ServerConfig) -> None:
    """Check the names and files of given adapters; the core checks their weights.

    Raises:
        ConfigError: adapters are not enabled, an entry is malformed, or a directory is none of an adapter.
    """
    if not server.offers_adapters:
        return
    from quire.entrypoints.openai.adapter_serving import adapter_serving

    adapter_serving().check_options(engine, server)


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
        return say_failure(error)


def _run_router(ctx: click.Context, model: str | None, params: dict[str, Any]) -> int:
    """Serve several models, each by a server of its own."""
    from quire.model_router.flags import check_names, inherited_flags
    from quire.model_router.models_file import read_models
    from quire.model_router.run import run_router

    if model is not None:
        raise click.UsageError(f"MODEL {model} and --models are both given; --models names all models")
    given = {name: value for name, value in params.items() if value is not None and value != ()}
    router, server = router_config(params), server_config(params)

    def check_options(options: Mapping[str, Any]) -> None:
        """Check a model's options as this command would check them."""
        check_names(options, params)
        defaults = {name.replace("-", "_"): value for name, value in options.items()}
        try:
            with ctx.command.make_context("serve", [], default_map=defaults) as checked:
                engine_config(checked.params)
                server_config(checked.params)
        except click.ClickException as error:
            raise ConfigError(error.format_message()) from None

    read = partial(read_models, router, check_options, inherited_flags(given))
    return run_router(read(), server, router, read=read, json_log=given.get("log_format") == "json")


def _check_one_model(params: dict[str, Any]) -> None:
    """Reject the router's flags without --models."""
    for field in fields(ModelRouterConfig):
        if params[field.name] is not None:
            raise click.UsageError(f"{flag_of(field.name)} has no effect without --models")


def _model_name(ctx: click.Context, argument: str | None, option: str | None) -> str | None:
    """Return the model given by position or flag, which both override a config file's."""
    flag_given = ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
    if argument is not None and flag_given and argument != option:
        raise click.UsageError(f"two models are named, MODEL {argument} and --model {option}; name one")
    return argument if argument is not None else option
