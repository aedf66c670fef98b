# SPDX-License-Identifier: Apache-2.0
"""vLLM's command lines in quire's flags.

Replaces vLLM's flags by the tables, keys of JSON options with a dot (`--speculative-config.method ngram`), lists with
several values behind one flag, lists in JSON, and adapters in JSON. Invariant: a command line of quire's own flags,
each with one value, keeps its meaning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError
from quire.vllm_names.llama_options import LLAMA_OPTIONS
from quire.vllm_names.option_values import translated_value
from quire.vllm_names.options import NAMED_PATHS, OPTIONS
from quire.vllm_names.row import NameRow, Table, Takes, flag_of, translated
from quire.vllm_names.server_options import SERVER_OPTIONS

FLAGS: Table = {**LLAMA_OPTIONS, **OPTIONS, **SERVER_OPTIONS}
"""Rows of every command with an engine."""
_LEVEL = "-O"
_OWN_SHORT = {
    "-sc": "speculative_config",
    "-q": "quantization",
    "-ep": "enable_expert_parallel",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-ac": "attention_config",
    "-m": "model",
}
"""Short forms of vLLM and llama.cpp, of options that quire has under the same long name."""


@dataclass(frozen=True)
class OwnFlag:
    """Flag of the command, by its option's name.

    Args:
        takes: NOTHING, ONE, or MANY for one that may be repeated.
        is_json: its value is a JSON object, whose keys vLLM also writes behind a dot.
    """

    option: str
    takes: Takes
    is_json: bool = False


@dataclass
class _Parsed:
    """Command line in the making: what stays, and values by option name that are added to it."""

    table: Table
    kept: list[str] = field(default_factory=list)
    theirs: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_argument: bool | None = False


def translated_arguments(
    arguments: Sequence[str],
    own: Mapping[str, OwnFlag],
    *,
    table: Table = FLAGS,
    has_argument: bool | None = False,
) -> list[str]:
    """Return a command line in quire's flags.

    Args:
        own: flag -> the command's option, with all spellings such as `--no-x` and `-tp`.
        table: vLLM's flags of the command.
        has_argument: arguments behind a list are its values, since the command expects no other one. Without it, they
            are behind the first argument only; None: never, so that each value needs its flag.

    Raises:
        ConfigError: a flag or a value is not supported; the message says what to do.
    """
    parsed = _Parsed(table, has_argument=has_argument)
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            parsed.kept += [argument, *rest]
            break
        if argument.startswith("-") and argument != "-":
            _take_flag(argument, rest, parsed, own)
        else:
            parsed.kept.append(argument)
            parsed.has_argument = None if parsed.has_argument is None else True
    added = _added(parsed, {flag.option: flag for flag in own.values()})
    return [*added, *parsed.kept]


def _take_flag(argument: str, rest: list[str], parsed: _Parsed, own: Mapping[str, OwnFlag]) -> None:
    name, equals, inline = argument.partition("=")
    name = name if name in own else name.replace("_", "-")
    name = flag_of(_OWN_SHORT[name]) if name in _OWN_SHORT and name not in own else name
    if name in own:
        _take_own(own[name], name, [inline] if equals else [], rest, parsed)
    elif "." in name:
        _take_key(name, inline if equals else None, argument, rest, parsed, own)
    elif (row := _row_of(name, parsed.table)) is not None:
        values = [inline] if equals else _own_value(name)
        parsed.theirs[row.name] = _value_of(row, name, values, rest)
    else:
        parsed.kept.append(argument)


def _row_of(name: str, table: Table) -> NameRow | None:
    if not name.startswith("--"):
        short = _LEVEL if name.startswith(_LEVEL) and (name == _LEVEL or name[2:].isdigit()) else name
        return next((row for row in table.values() if short in row.short), None)
    plain = name.removeprefix("--").replace("-", "_")
    return table.get(plain) or table.get(plain.removeprefix("no_"))


def _own_value(name: str) -> list[str]:
    """Return the value within a short flag: `-O3`."""
    return [name[2:]] if name.startswith(_LEVEL) and len(name) > 2 else []


def _value_of(row: NameRow, name: str, values: list[str], rest: list[str]) -> Any:
    """Remove the values of one of vLLM's flags from the rest, and return them."""
    if row.takes is Takes.NOTHING and not values:
        return not name.startswith("--no-") if not _switch_value(rest) else rest.pop(0).lower() == "true"
    if not values:
        values = list(_following(rest, most=1 if row.takes is Takes.ONE else None))
    if row.takes is Takes.NOTHING:
        return values[0].lower() != "false"
    if row.takes is Takes.MANY:
        return [entry for value in values for entry in _list_of(row.name, value)]
    value = values[0] if values else None
    return _scalar(value) if value is not None and "." in row.to else value


def _switch_value(rest: list[str]) -> bool:
    return bool(rest) and rest[0].lower() in ("true", "false")


def _following(rest: list[str], most: int | None) -> Iterator[str]:
    """Remove and yield the arguments up to the next flag."""
    while rest and most != 0 and not _is_flag(rest[0]):
        yield rest.pop(0)
        most = None if most is None else most - 1


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and not argument[1:2].isdigit() and argument != "-"


def _take_own(flag: OwnFlag, name: str, values: list[str], rest: list[str], parsed: _Parsed) -> None:
    if flag.takes is Takes.NOTHING:
        parsed.kept += [f"{name}={value}" for value in values] or [name]
        return
    if not values and rest:
        values = [rest.pop(0)]
        if flag.takes is Takes.MANY and parsed.has_argument:
            values += _following(rest, most=None)
    if flag.takes is Takes.MANY:
        values = [entry for value in values for entry in _list_of(flag.option, value)]
        parsed.kept += [part for value in values for part in (name, value)] or [name]
    else:
        parsed.kept += [name, *(translated_value(flag.option, value) for value in values)]


def _list_of(option: str, value: str) -> list[str]:
    """Return the entries of one value of a list, which vLLM may write as JSON."""
    if option in NAMED_PATHS and value.startswith("{"):
        module = _json(flag_of(option), value)
        if not isinstance(module.get("name"), str) or not isinstance(module.get("path"), str):
            raise ConfigError(f'{flag_of(option)} needs "name" and "path" (or NAME=DIRECTORY), got {value}')
        return [f"{module['name']}={module['path']}"]
    entries = _scalar(value) if value.startswith('["') else None
    return list(map(str, entries)) if isinstance(entries, list) else [value]


def _json(flag: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{flag}: {value!r} is not JSON: {error}") from None


def _take_key(
    name: str,
    value: str | None,
    argument: str,
    rest: list[str],
    parsed: _Parsed,
    own: Mapping[str, OwnFlag],
) -> None:
    """Remove `--option.key value` of a JSON option; keys of vLLM's options follow their row."""
    base, _, path = name.partition(".")
    base = flag_of(_OWN_SHORT[base]) if base in _OWN_SHORT else base
    appends = path.endswith("+")
    flag, row = own.get(base), _row_of(base, parsed.table)
    if (flag is None or not flag.is_json) and row is None:
        parsed.kept.append(argument)
        return
    text = value if value is not None else next(_following(rest, most=1), "true")
    option = flag.option if flag is not None else row.name if row is not None else ""
    keys = path.removesuffix("+").replace("-", "_").split(".")
    _set_key(parsed.keys.setdefault(option, {}), keys, text.split(",") if appends else _scalar(text))


def _set_key(inside: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inside = inside.setdefault(key, {})
    inside[keys[-1]] = value


def _scalar(text: str) -> Any:
    """Return a value as JSON has it, or as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _added(parsed: _Parsed, own: Mapping[str, OwnFlag]) -> list[str]:
    """Return the flags in place of those that were removed."""
    given: dict[str, Any] = dict(parsed.theirs)
    for option, keys in parsed.keys.items():
        given[option] = {**_pop_json(option, parsed.kept), **keys} if option in own else keys
    rows = [row for name in given if (row := parsed.table.get(name)) and "." in row.to]
    for option in {row.to.partition(".")[0] for row in rows}:
        given[option] = {**_pop_json(option, parsed.kept), **given.get(option, {})}
    result = translated(given, parsed.table, own, flag_of)
    added = {option: _as_flags(option, value) for option, value in result.items()}
    for flags in added.values():
        _check_conflict(flags, parsed.kept)
    return [part for flags in added.values() for part in flags]


def _check_conflict(flags: list[str], kept: list[str]) -> None:
    """Refuse another value of a flag that one of vLLM's stands for."""
    if flags and flags[0] in kept:
        given = kept[kept.index(flags[0]) :][: len(flags)]
        if given != flags:
            raise ConfigError(
                f"{' '.join(flags)} is what a flag of vLLM's means, but {' '.join(given)} is given; drop one"
            )


def _pop_json(option: str, kept: list[str]) -> dict[str, Any]:
    """Remove a JSON option from the kept arguments, and return its value."""
    flag = flag_of(option)
    if flag not in kept or kept.index(flag) + 1 == len(kept):
        return {}
    place = kept.index(flag)
    value = _json(flag, kept[place + 1])
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {value!r}")
    del kept[place : place + 2]
    return value


_AS_TEXT: Mapping[type, Callable[[str, Any], list[str]]] = {
    bool: lambda flag, value: [flag if value else f"--no-{flag.removeprefix('--')}"],
    dict: lambda flag, value: [flag, json.dumps(value)] if value else [],
    list: lambda flag, value: [part for entry in value for part in (flag, str(entry))],
}


def _as_flags(option: str, value: Any) -> list[str]:
    write = _AS_TEXT.get(type(value))
    return [flag_of(option), str(value)] if write is None else write(flag_of(option), value)
