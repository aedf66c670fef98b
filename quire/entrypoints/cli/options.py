# SPDX-License-Identifier: Apache-2.0
"""Command-line options generated from the config classes, `--config FILE`, constraint options, and value types.

Invariant: name, type, choices, help and default of a flag come from the field's one declaration. A flag that is not
given is None (or empty) and keeps the default. A config file's value applies only where the command line gives none;
each key is a flag. Value types accept their own results, since values of a config file are already typed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from quire.config import EngineConfig, ModelRouterConfig, ServerConfig, child_configs, engine_fields
from quire.config.fields import (
    Config,
    OptionInfo,
    default_of,
    field_types,
    flag_of,
    info_of,
    parse_integer,
    plain_type,
)
from quire.errors import ConfigError, yaml_place
from quire.logging_setup import configure_logging
from quire.vllm_names.command_line import FLAGS, OwnFlag, translated_arguments
from quire.vllm_names.environment import adopt_environment
from quire.vllm_names.option_values import translated_values
from quire.vllm_names.row import Table, Takes, nearest, suggestion, translated

_CONFIG_FILE = "quire.config_file"  # Key of the context's `meta`.

Command = TypeVar("Command", bound=Callable[..., Any])


def config_file_option() -> click.Option:
    """Return the option `--config`; parsed before all others, because its values become their defaults."""
    return click.Option(
        ["--config"],
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_read_defaults,
        help="YAML file of flags, without the dashes in front; the command line wins over it.",
    )


def read_config_file(path: str, options: dict[str, click.Option]) -> dict[str, Any]:
    """Return the file's values by parameter name; keys may use - or _, and null means absent.

    Raises:
        ConfigError: the file cannot be read, is not a mapping, or has an unknown or repeated key.
    """
    values: dict[str, Any] = {}
    for key, value in _load_mapping(path).items():
        name = str(key).replace("-", "_")
        if name not in options and name not in FLAGS:
            raise ConfigError(f"{path}: unknown key {key!r}{_suggestion(name, options)}")
        if name in values:
            raise ConfigError(f"{path}: key {key!r} is given twice, once with - and once with _")
        values[name] = value
    values = translated_values(translated(values, FLAGS, options, lambda name: f"{path}: {name}"))
    return {
        name: [value] if options[name].multiple and not isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }


def _read_defaults(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path is not None:
        options = {
            option.name: option
            for option in ctx.command.params
            if isinstance(option, click.Option) and option.name and option is not param
        }
        ctx.default_map = read_config_file(path, options)
        ctx.meta[_CONFIG_FILE] = path


def _load_mapping(path: str) -> dict[Any, Any]:
    import yaml  # imported only if --config is given

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML{yaml_place(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError(f"--config {path} must hold a mapping of flags to values, not a {kind}")
    return content


def _suggestion(name: str, options: dict[str, click.Option]) -> str:
    return suggestion(name, options) or "; `--help` lists the flags"


def constraint_options(command: Command) -> Command:
    """Add the constraint options to a command; `structured_outputs` removes them from its parameters."""
    options = (
        click.option(
            "--json-schema", metavar="JSON", help="The answer is JSON of this schema; @FILE reads it."
        ),
        click.option("--regex", help="The answer matches this expression as a whole."),
        click.option("--choice", multiple=True, help="The answer is one of these; given several times."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def structured_outputs(params: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the constraint from a command's parameters and return it; None if there is none.

    Raises:
        UsageError: there are several, or the schema is not JSON.
    """
    schema, regex, choice = (params.pop(name) for name in ("json_schema", "regex", "choice"))
    given: dict[str, Any] = {"json": _schema(schema), "regex": regex, "choice": list(choice) or None}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise click.UsageError("give only one of --json-schema, --regex and --choice")
    return given or None


def _schema(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"--json-schema: {error}") from None


class HumanInt(click.ParamType[int]):
    """An integer; k, m, g, t multiply by powers of 1000 and K, M, G, T by powers of 1024: 2k, 4K, 2.5m.

    `words` maps words to numbers.
    """

    name = "integer"

    def __init__(self, minimum: int | None = None, words: tuple[tuple[str, int], ...] = ()) -> None:
        self.minimum = minimum
        self.words = dict(words)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = self._number(value, param, ctx)
        if self.minimum is not None and number < self.minimum:
            self.fail(f"{value!r} is less than {self.minimum}", param, ctx)
        return number

    def _number(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value in self.words:
            return self.words[value]
        try:
            return parse_integer(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class JsonObjectType(click.ParamType[dict[str, Any]]):
    """A JSON object such as {"temperature": 0.5}."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            parsed = json.loads(value)
        except (TypeError, ValueError) as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return parsed


class NamesType(click.Choice[str]):
    """Choice of names of a config field, with advice for another."""

    def __init__(self, info: OptionInfo) -> None:
        super().__init__(info.names())
        self._info = info

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        message = super().get_invalid_choice_message(value, ctx)
        return message.removesuffix(".") + self._info.advice(value)


class Rate(click.ParamType[float]):
    """Requests per second, greater than 0; `inf` is as fast as possible."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            rate = float(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not a number", param, ctx)
        if not rate > 0:
            self.fail(f"{value!r} is not greater than 0", param, ctx)
        return rate


class FiniteRange(click.FloatRange):
    """Range of numbers without infinity and nan, which click takes for within any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not finite", param, ctx)
        return number


_CLICK_TYPES: dict[type, click.ParamType[Any]] = {
    int: HumanInt(),
    float: click.FLOAT,
    str: click.STRING,
    tuple: click.STRING,
    dict: JsonObjectType(),
}


class ConfigOption(click.Option):
    """Flag of one config field; `section` is its heading in `--help`."""

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


COMMON = (
    "model", "served_model_name", "host", "port", "api_key", "max_model_len", "max_num_seqs", "dtype", "quantization",
    "tensor_parallel_size",
)  # fmt: skip
"""Fields whose flags come first in `--help`, in this order."""


class TranslatedCommand(click.Command):
    """Command that reads vLLM's flags beside its own.

    Args:
        vllm_flags: rows of vLLM's flags.
    """

    def __init__(self, *args: Any, vllm_flags: Table, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vllm_flags = vllm_flags

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse flags, those of vLLM included."""
        own = {
            flag: _own_flag(param)
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for flag in (*param.opts, *param.secondary_opts)
        }
        arguments = [param.name for param in self.params if isinstance(param, click.Argument)]
        has_argument = "--model" in args if set(arguments) <= {"model_argument"} else None
        try:
            args = translated_arguments(args, own, table=self.vllm_flags, has_argument=has_argument)
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from None
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise without_far_suggestions(error, own) from None
        except click.BadParameter as error:
            raise _with_source(error, ctx) from None


class EngineCommand(TranslatedCommand):
    """Command with `--config FILE` and a flag for each field of the engine's configs and `more_configs`."""

    def __init__(
        self,
        *args: Any,
        more_configs: tuple[type[Config], ...] = (),
        vllm_flags: Table = FLAGS,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, vllm_flags=vllm_flags, **kwargs)
        self.params.append(config_file_option())
        for owner in (*child_configs().values(), *more_configs):
            self.params.extend(options_of(owner))

    def invoke(self, ctx: click.Context) -> Any:
        """Configure logging by the command's flags, and run it."""
        adopt_environment()
        configure_logging(ctx.params["log_level"], ctx.params["log_format"])
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Common options": []}
        common: dict[str, tuple[str, str]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or not isinstance(param, click.Option):
                continue
            if isinstance(param, ConfigOption) and param.name in COMMON:
                common[param.name] = record
            else:
                section = param.section if isinstance(param, ConfigOption) else "Options"
                sections.setdefault(section, []).append(record)
        sections["Common options"] = [common[name] for name in COMMON if name in common]
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


def _with_source(error: click.BadParameter, ctx: click.Context) -> click.UsageError:
    """Return the error with the config file in front, if the value is of it."""
    name = error.param.name if error.param is not None else None
    is_of_file = name is not None and ctx.get_parameter_source(name) is click.core.ParameterSource.DEFAULT_MAP
    if not is_of_file or _CONFIG_FILE not in ctx.meta:
        return error
    return click.UsageError(f"{ctx.meta[_CONFIG_FILE]}: {error.format_message()}", ctx)


def _own_flag(option: click.Option) -> OwnFlag:
    takes = Takes.NOTHING if option.is_flag else Takes.MANY if option.multiple else Takes.ONE
    return OwnFlag(str(option.name), takes, is_json=isinstance(option.type, JsonObjectType))


def without_far_suggestions(
    error: click.NoSuchOption, flags: Iterable[str] | None = None
) -> click.NoSuchOption:
    """Return the error with the flag that is close in spelling, if there is one.

    Args:
        flags: candidates; None: click's suggestions, which only share some letters.
    """
    near = nearest(error.option_name, error.possibilities or () if flags is None else flags)
    return click.NoSuchOption(error.option_name, possibilities=[near] if near else None, ctx=error.ctx)


def options_of(owner: type[Config]) -> list[ConfigOption]:
    """Return a flag for each field of a config class, in order."""
    return [ConfigOption(owner, field) for field in dataclasses.fields(owner)]


def engine_config(params: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's config from parsed flags; other entries of `params` are ignored.

    Raises:
        ConfigError: a value is out of range.
    """
    return EngineConfig.from_args(**_given(params, engine_fields()))


def server_config(params: Mapping[str, Any]) -> ServerConfig:
    """Return the server's config from parsed flags; raises ConfigError as `engine_config` does."""
    return ServerConfig(**_given(params, field_types(ServerConfig)))


def router_config(params: Mapping[str, Any]) -> ModelRouterConfig:
    """Return the config of the router of models from parsed flags; raises ConfigError as `engine_config` does."""
    return ModelRouterConfig(**_given(params, field_types(ModelRouterConfig)))


def default_note(field: dataclasses.Field[Any]) -> str:
    """Return `[default: 16]`, or nothing for an empty default, which the documentation explains."""
    default = default_of(field)
    if default is None or default in ("", (), {}):
        return ""
    shown = json.dumps(default) if isinstance(default, bool) else default
    return f"[default: {shown}]"


def _click_type(info: OptionInfo, kind: type) -> click.ParamType[Any] | None:
    if info.choices and not info.places:
        return NamesType(info)
    return HumanInt(words=info.words) if info.words else _CLICK_TYPES.get(kind)


def _names(info: OptionInfo) -> str | None:
    """Return the metavar for open sets of names; click shows closed ones itself."""
    return f"[{'|'.join(info.names())}|MODULE:CLASS]" if info.choices and info.places else None


def _declaration(name: str, kind: type) -> str:
    flag = flag_of(name)
    return f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag


def _given(params: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in names if params[name] is not None and params[name] != ()}
