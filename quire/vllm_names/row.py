# SPDX-License-Identifier: Apache-2.0
"""Row of a table of vLLM's names, and the translation of given values by such a table.

Invariant: a name that quire has is never translated. Every translation is logged once per process; nothing is dropped
silently.
"""

from __future__ import annotations

import difflib
import enum
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError

logger = logging.getLogger("quire.vllm_names")

CLOSE = 0.85
"""Least similarity of a suggestion: below it, names that share a prefix such as `enable_` would be suggested."""

Values = Mapping[Any, Mapping[str, Any]]


class Fate(enum.Enum):
    """Handling of a name."""

    ACCEPTED = "accepted"
    RENAMED = "renamed"
    REFUSED = "not supported"


class Takes(enum.Enum):
    """Values of a flag on the command line."""

    NOTHING = "switch"  # `--flag`, `--no-flag`
    ONE = "value"
    MANY = "values"  # as many as follow


@dataclass(frozen=True)
class NameRow:
    """One of vLLM's names.

    Args:
        why: reason, as a sentence without its final period: why nothing happens, or what to do instead.
        to: quire's name; `option.key` is a key of an option that holds a JSON object.
        values: value -> quire's options; other values are refused. Replaces `to`.
        harmless: values of a refused name that ask for nothing; they are accepted.
        short: further spellings on the command line, such as `-dcp`.
    """

    name: str
    fate: Fate
    why: str
    to: str = ""
    values: Values = field(default_factory=dict)
    harmless: tuple[Any, ...] = ()
    takes: Takes = Takes.ONE
    short: tuple[str, ...] = ()


Table = Mapping[str, NameRow]


def accepted(names: str, why: str, takes: Takes = Takes.ONE, short: tuple[str, ...] = ()) -> list[NameRow]:
    """Return rows of names without effect, given as words."""
    return [NameRow(name, Fate.ACCEPTED, why, takes=takes, short=short) for name in names.split()]


def renamed(
    name: str, to: str, why: str = "", takes: Takes = Takes.ONE, short: tuple[str, ...] = ()
) -> list[NameRow]:
    """Return the row of a name with another one here."""
    return [NameRow(name, Fate.RENAMED, why, to=to, takes=takes, short=short)]


def by_value(
    name: str, values: Values, why: str, takes: Takes = Takes.ONE, short: tuple[str, ...] = ()
) -> list[NameRow]:
    """Return the row of a name whose values are values of other options."""
    return [NameRow(name, Fate.RENAMED, why, values=values, takes=takes, short=short)]


def refused(
    names: str,
    why: str,
    harmless: tuple[Any, ...] = (),
    takes: Takes = Takes.ONE,
    short: tuple[str, ...] = (),
) -> list[NameRow]:
    """Return rows of unsupported names, given as words."""
    return [
        NameRow(name, Fate.REFUSED, why, harmless=harmless, takes=takes, short=short)
        for name in names.split()
    ]


def table_of(*groups: list[NameRow]) -> Table:
    """Return rows by name."""
    rows = [row for group in groups for row in group]
    table = {row.name: row for row in rows}
    assert len(table) == len(rows), "a name has two rows"
    return table


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that is close in spelling; None if there is none.

    Two letters in the wrong order are close in a short name as well.
    """
    names = list(names)
    found = difflib.get_close_matches(name, names, n=1, cutoff=CLOSE)
    return found[0] if found else next((other for other in names if _is_swapped(name, other)), None)


def _is_swapped(name: str, other: str) -> bool:
    """Return whether two neighboring letters are all that differs."""
    places = [i for i, (a, b) in enumerate(zip(name, other, strict=False)) if a != b]
    if len(name) != len(other) or len(places) != 2 or places[1] != places[0] + 1:
        return False
    first, second = places
    return name[first] == other[second] and name[second] == other[first]


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name, empty without a close one."""
    near = nearest(name, names)
    return f"; did you mean {near!r}?" if near else ""


_logged: set[tuple[str, str]] = set()


def log_once(name: str, message: str) -> None:
    """Log a message about a name, once per process."""
    if (name, message) not in _logged:
        _logged.add((name, message))
        logger.warning("%s: %s", name, message)


def flag_of(name: str) -> str:
    """Return a name as a command-line flag; a key behind a dot keeps its spelling."""
    option, dot, key = name.partition(".")
    return "--" + option.replace("_", "-") + dot + key


def translated(
    given: Mapping[str, Any], table: Table, own: Iterable[str], spelling: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return the arguments with vLLM's names replaced; unknown names stay.

    Args:
        own: quire's names, which have precedence over the table.
        spelling: form of a name in messages.

    Raises:
        ConfigError: a name, or one of its values, is not supported; or a new name is given as well.
    """
    ours = frozenset(own)
    result = {name: value for name, value in given.items() if name in ours or name not in table}
    for name in given.keys() - result.keys():
        row, value = table[name], given[name]
        if not _asks_for_nothing(row, value):
            for target, replacement in _replacements(row, value, spelling).items():
                _put(result, target, replacement, spelling(name), spelling)
    return result


def _asks_for_nothing(row: NameRow, value: Any) -> bool:
    """Return whether a value, possibly as text from a command line, is the absence of what the name stands for."""
    if value is None:
        return True
    texts = {_plain(harmless) for harmless in row.harmless}
    return bool(row.harmless) and _plain(value) in texts


def _plain(value: Any) -> str:
    return str(value).lower().removesuffix(".0")


def _replacements(row: NameRow, value: Any, spelling: Callable[[str], str]) -> dict[str, Any]:
    name = spelling(row.name)
    if row.fate is Fate.REFUSED:
        raise ConfigError(f"{name} is not supported: {row.why}")
    if row.fate is Fate.ACCEPTED:
        log_once(name, f"accepted, without effect: {row.why}")
        return {}
    if not row.values:
        log_once(name, f"is {spelling(row.to)} in quire")
        return {row.to: value}
    found = {_plain(key): options for key, options in row.values.items()}.get(_plain(value))
    if found is None:
        known = ", ".join(map(str, row.values))
        raise ConfigError(f"{name} must be one of {known}, got {value!r}; {row.why}")
    shown = " ".join(f"{spelling(target)}={new}" for target, new in found.items()) or "the default"
    log_once(name, f"{value} is {shown} in quire")
    return dict(found)


def _put(
    result: dict[str, Any], target: str, value: Any, source: str, spelling: Callable[[str], str]
) -> None:
    option, _, key = target.partition(".")
    if not key:
        if result.get(option) not in (None, (), value):
            raise ConfigError(f"{source} is {spelling(option)} in quire, which is given as well; drop one")
        result[option] = value
        return
    whole = dict(result.get(option) or {})
    if whole.get(key, value) != value:
        raise ConfigError(f"{source} is the key {key} of {spelling(option)}, which has another value")
    result[option] = {**whole, key: value}
