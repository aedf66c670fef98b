# SPDX-License-Identifier: Apache-2.0
"""Flags of config classes for `argparse`, as vLLM's scripts use it; the `quire` command has its own (click).

Invariant: a flag that is not given is None, which keeps the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

from quire.config.fields import Config, OptionInfo, field_types, flag_of, info_of, parse_integer, plain_type

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_arguments(parser: argparse.ArgumentParser, owner: type[Config]) -> None:
    """Add a group of flags, one for each field of a config class."""
    group = parser.add_argument_group(owner.__name__, owner.__doc__)
    for field in dataclasses.fields(owner):
        info, expected = info_of(field), field_types(owner)[field.name]
        names = [flag_of(field.name), *([info.short] if info.short else [])]
        group.add_argument(*names, dest=field.name, default=None, help=_help(info), **_kind(expected, info))


def _kind(expected: Any, info: OptionInfo) -> dict[str, Any]:
    kind = plain_type(expected)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind is tuple:
        return {"action": "extend", "nargs": "+", "type": _integer if expected == tuple[int, ...] else str}
    return {"type": _READERS.get(kind, str) if not info.words else _with_words(info)}


def _help(info: OptionInfo) -> str:
    return info.doc.replace("%", "%%")


def _integer(text: str) -> int:
    try:
        return parse_integer(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _with_words(info: OptionInfo) -> Callable[[str], int]:
    words = dict(info.words)
    return lambda text: words[text] if text in words else _integer(text)


def parse_object(text: str) -> Any:
    """Return the value of a JSON option; raises ArgumentTypeError if it is no JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


_READERS: dict[type, Callable[[str], Any]] = {int: _integer, float: float, dict: parse_object}
