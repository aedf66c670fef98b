# SPDX-License-Identifier: Apache-2.0
"""Declaration, documentation and validation of configuration fields; flags for `argparse`; hashing of API keys.

Invariant: every field of every config class is declared with `option`, so it has a default and a documentation
sentence; flags, `--help` and the docs page are generated from these declarations. API keys are hashed when read. The
`quire` command has flags of its own (click); those for `argparse` are for scripts written for vLLM, and one that is not
given is None, which keeps the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from quire.errors import ConfigError
from quire.plugins import plugin_names

HASHED = "sha256:"  # Prefix of a hashed key, followed by 64 hex digits.


def hashed_key(key: str, of: str = "--api-key") -> str:
    """Return the hash of a key; a hashed key is returned as is.

    Args:
        of: source of the key, for the error.

    Raises:
        ConfigError: it is no valid key. The message does not quote it.
    """
    if not key.startswith(HASHED):
        if not key or key != key.strip():
            raise ConfigError(f"{of}: a key is empty, or begins or ends with white space")
        return HASHED + hashlib.sha256(key.encode()).hexdigest()
    digits = key.removeprefix(HASHED).lower()
    if len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        raise ConfigError(f"{of}: a key begins with {HASHED}, but 64 hex digits do not follow")
    return HASHED + digits


def digest_of(hashed: str) -> bytes:
    """Return the SHA-256 digest of a hashed key."""
    return bytes.fromhex(hashed.removeprefix(HASHED))


@dataclass(frozen=True)
class OptionInfo:
    """Documentation and limits of one field.

    `metavar` is shown in `--help`; `words` are symbolic values. Names in the entry-point group `plugins` are choices,
    too, and with `places` classes as "module:Class". `elsewhere` has, for values of another option, what to do instead.
    """

    doc: str
    choices: tuple[str, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    metavar: str | None = None
    short: str | None = None
    plugins: str = ""
    words: tuple[tuple[str, int], ...] = ()
    places: bool = False
    elsewhere: tuple[tuple[str, str], ...] = ()

    def names(self) -> tuple[str, ...]:
        """Return the choices on this machine; empty: any value of the right type."""
        return (*self.choices, *plugin_names(self.plugins)) if self.plugins else self.choices

    def advice(self, value: Any) -> str:
        """Return the end of a message about a value that is no choice: what to do instead, or the nearest choice."""
        names = dict(self.elsewhere)
        if value in names:
            return f"; {names[value]}"
        near = difflib.get_close_matches(value, self.names(), n=1) if isinstance(value, str) else []
        return f"; did you mean {near[0]!r}?" if near else ""

    def admits(self, value: Any) -> bool:
        """Return whether a value is one of the choices, or a class where those are allowed."""
        return not self.choices or value in self.names() or (self.places and ":" in value)


def option(default: Any, doc: str, **limits: Any) -> Any:
    """Return a dataclass field with documentation and limits (see `OptionInfo`)."""
    metadata = {"option": OptionInfo(doc=doc, **limits)}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """Base of all config classes, which validates its fields on construction.

    Raises:
        ConfigError: names the flag, the bad value and what is allowed.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_value(
                field.name, getattr(self, field.name), field_types(type(self))[field.name], info_of(field)
            )


def info_of(field: dataclasses.Field[Any]) -> OptionInfo:
    """Return the declaration of a field."""
    info = field.metadata["option"]
    assert isinstance(info, OptionInfo)
    return info


def info_named(owner: type, name: str) -> OptionInfo:
    """Return the declaration of a config class's field."""
    return next(info_of(field) for field in dataclasses.fields(owner) if field.name == name)


def field_types(owner: type) -> dict[str, Any]:
    """Return field name -> resolved type of a config class."""
    return _resolved_types(owner)


@functools.cache
def _resolved_types(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default value of a field."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


_INTEGER = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKmMgGtT]?)")
_UNITS = {unit: 1000 ** (power + 1) for power, unit in enumerate("kmgt")}
_UNITS |= {unit: 1024 ** (power + 1) for power, unit in enumerate("KMGT")}
_UNITS[""] = 1


def parse_integer(text: str) -> int:
    """Return the integer of a text, in which k is 1000 and K is 1024; raises ValueError with a message for the user."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an integer (1k is 1000, 1K is 1024)")
    exact = Fraction(match[1]) * _UNITS[match[2]]
    if exact.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(exact)


def flag_of(name: str) -> str:
    """Return the command-line flag of a field name."""
    return "--" + name.replace("_", "-")


def check_value(name: str, value: Any, expected: Any, info: OptionInfo) -> None:
    """Raise ConfigError unless `value` has the declared type and lies within the declared limits."""
    if value is None and _is_optional(expected):
        return
    kind = plain_type(expected)
    if not _has_type(value, kind):
        raise ConfigError(f"{flag_of(name)} must be {_type_name(kind)}, got {value!r}")
    if not info.admits(value):
        known = ", ".join(info.names())
        raise ConfigError(f"{flag_of(name)} must be one of {known}, got {value!r}{info.advice(value)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_range(name, value, info)


def _check_range(name: str, value: float, info: OptionInfo) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{flag_of(name)} must be finite, got {value}")
    if info.ge is not None and value < info.ge:
        raise ConfigError(f"{flag_of(name)} must be at least {info.ge:g}, got {value}")
    if info.gt is not None and value <= info.gt:
        raise ConfigError(f"{flag_of(name)} must be greater than {info.gt:g}, got {value}")
    if info.le is not None and value > info.le:
        raise ConfigError(f"{flag_of(name)} must be at most {info.le:g}, got {value}")


def _is_optional(expected: Any) -> bool:
    return isinstance(expected, types.UnionType) and type(None) in typing.get_args(expected)


def plain_type(expected: Any) -> Any:
    """Return a field's type without `| None` and type arguments: `tuple[str, ...] | None` -> `tuple`."""
    if _is_optional(expected):
        expected = next(arg for arg in typing.get_args(expected) if arg is not type(None))
    return typing.get_origin(expected) or expected


def _has_type(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _type_name(kind: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", tuple: "a list"}
    return names.get(kind, "a JSON object" if kind is dict else str(kind))


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
