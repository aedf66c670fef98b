"""Command-line flags, generated from the config classes.

Invariant: a config field and its flag cannot differ, because name, type, choices, help and default are read
from the field's one declaration; a flag that is not given is None (or empty) and leaves the default alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import click

from quire.config import EngineConfig, ServerConfig, child_configs, engine_fields
from quire.config.fields import Config, OptionInfo, field_types, flag_of, info_of, plain_type
from quire.entrypoints.cli.config_file import config_file_option
from quire.entrypoints.cli.values import HumanInt, JsonObject
from quire.logging_setup import configure_logging

_CLICK_TYPES: dict[type, click.ParamType[Any]] = {
    int: HumanInt(),
    float: click.FLOAT,
    str: click.STRING,
    tuple: click.STRING,
    dict: JsonObject(),
}


class ConfigOption(click.Option):
    """The flag of one config field; `section` is its heading in `--help`."""

    def __init__(self, owner: type[Config], field: dataclasses.Field[Any]) -> None:
        info = info_of(field)
        expected = field_types(owner)[field.name]
        kind = plain_type(expected)
        super().__init__(
            [field.name, *([info.short] if info.short else []), _declaration(field.name, kind)],
            default=None,
            type=_click_type(info, int if expected == tuple[int, ...] else kind),
            help=f"{info.doc} {default_note(field)}".rstrip(),
            multiple=kind is tuple,
            metavar=info.metavar or _names(info),
        )
        self.section = f"{owner.__name__.removesuffix('Config')} options"


class EngineCommand(click.Command):
    """A command with `--config FILE` and a flag for each field of the engine's configs and `more_configs`."""

    def __init__(self, *args: Any, more_configs: tuple[type[Config], ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(config_file_option())
        for owner in (*child_configs().values(), *more_configs):
            self.params.extend(options_of(owner))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; its log is as its flags say."""
        configure_logging(ctx.params["log_level"], ctx.params["log_format"])
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                section = param.section if isinstance(param, ConfigOption) else "Options"
                sections.setdefault(section, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


def options_of(owner: type[Config]) -> list[ConfigOption]:
    """One flag for each field of a config class, in the order of the fields."""
    return [ConfigOption(owner, field) for field in dataclasses.fields(owner)]


def engine_config(params: Mapping[str, Any]) -> EngineConfig:
    """The engine's config from parsed flags; other entries of `params` are left alone.

    Raises:
        ConfigError: a value is out of range.
    """
    return EngineConfig.from_args(**_given(params, engine_fields()))


def server_config(params: Mapping[str, Any]) -> ServerConfig:
    """The server's config from parsed flags; raises ConfigError as `engine_config` does."""
    return ServerConfig(**_given(params, field_types(ServerConfig)))


def default_note(field: dataclasses.Field[Any]) -> str:
    """`[default: 16]`, or nothing where the default is empty and the documentation says what that means."""
    default = default_of(field)
    if default is None or default in ("", (), {}):
        return ""
    shown = json.dumps(default) if isinstance(default, bool) else default
    return f"[default: {shown}]"


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The value of a field that nobody set."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _click_type(info: OptionInfo, kind: type) -> click.ParamType[Any] | None:
    if info.choices and not info.places:
        return click.Choice(info.names())
    return HumanInt(words=info.words) if info.words else _CLICK_TYPES.get(kind)


def _names(info: OptionInfo) -> str | None:
    """What `--help` shows where names are no closed set; click shows others itself."""
    return f"[{'|'.join(info.names())}|MODULE:CLASS]" if info.choices and info.places else None


def _declaration(name: str, kind: type) -> str:
    flag = flag_of(name)
    return f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag


def _given(params: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in names if params[name] is not None and params[name] != ()}
