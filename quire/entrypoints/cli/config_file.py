"""`--config FILE`: flags read from a YAML file.

Invariant: a file's value is used exactly where the command line gives none; each key is a flag.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import click

from quire.errors import ConfigError


def config_file_option() -> click.Option:
    """The option; it is parsed before all others, so that its values become their defaults."""
    return click.Option(
        ["--config"],
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_read_defaults,
        help="YAML file of flags, without the dashes in front; the command line wins over it.",
    )


def read_config_file(path: str, options: dict[str, click.Option]) -> dict[str, Any]:
    """The file's values by parameter name; keys may be spelt with - or _, and null is the same as no key.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or has a key that is no option or comes twice.
    """
    values: dict[str, Any] = {}
    for key, value in _load_mapping(path).items():
        name = str(key).replace("-", "_")
        if name not in options:
            raise ConfigError(f"{path}: unknown key {key!r}{_suggestion(name, options)}")
        if name in values:
            raise ConfigError(f"{path}: key {key!r} is given twice, once with - and once with _")
        if value is not None:
            values[name] = [value] if options[name].multiple and not isinstance(value, list) else value
    return values


def _read_defaults(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path is not None:
        options = {
            option.name: option
            for option in ctx.command.params
            if isinstance(option, click.Option) and option.name and option is not param
        }
        ctx.default_map = read_config_file(path, options)


def _load_mapping(path: str) -> dict[Any, Any]:
    import yaml  # only a command with --config pays for it

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError(f"--config {path} must hold a mapping of flags to values, not a {kind}")
    return content


def _suggestion(name: str, options: dict[str, click.Option]) -> str:
    near = difflib.get_close_matches(name, options, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; `--help` lists the flags"
