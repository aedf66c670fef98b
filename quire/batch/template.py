# SPDX-License-Identifier: Apache-2.0
"""Templates that make a prompt of a table's row.

`{name}` is the value of a column, `{"any name"}` the same for a name with braces or quotes (a JSON string), and `{{`
and `}}` are braces. Text is inserted as it is, null as nothing, numbers, lists and objects as JSON.
"""

from __future__ import annotations

import datetime
import decimal
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ConfigError, ValidationError

_PART = re.compile(r'\{\{|\}\}|\{("(?:[^"\\]|\\.)*"|[^{}"][^{}]*)\}|[{}]')
_PLAIN = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)


class PromptTemplate:
    """Parsed template.

    Args:
        name: of the option, for errors.

    Raises:
        ConfigError: a brace opens or closes nothing.
    """

    def __init__(self, text: str, name: str) -> None:
        self._parts: list[tuple[str, str | None]] = []  # Text, and the column whose value follows it.
        literal, place = "", 0
        for found in _PART.finditer(text):
            literal, place = literal + text[place : found.start()], found.end()
            if found[1] is not None:
                self._parts.append((literal, _column(found[1], name)))
                literal = ""
            elif len(found[0]) == 2:
                literal += found[0][0]
            else:
                raise ConfigError(
                    f"{name}: the brace at character {found.start() + 1} names no column; write {{column}}, "
                    '{"column"} for a name with braces or quotes, and {{ or }} for a brace itself'
                )
        self._parts.append((literal + text[place:], None))
        self.columns = tuple(dict.fromkeys(column for _, column in self._parts if column is not None))
        self._name = name

    def check(self, columns: Sequence[str]) -> None:
        """Check that a table has the columns.

        Raises:
            ConfigError: it lacks one.
        """
        for column in self.columns:
            if column not in columns:
                raise ConfigError(f"{self._name}: {missing(column, columns)}")

    def render(self, cells: Mapping[str, Any]) -> str:
        """Return the prompt of a row.

        Raises:
            ValidationError: the row lacks a column, or a value is no text.
        """
        text = ""
        for literal, column in self._parts:
            text += literal
            if column is None:
                continue
            if column not in cells:
                raise ValidationError(missing(column, list(cells)))
            text += _shown(cells[column], column)
        return text


def missing(column: str, columns: Sequence[str]) -> str:
    """Return the words for a column that is not among those that there are."""
    return f"there is no column {column!r}; there are: {', '.join(map(repr, columns)) or 'none'}"


def _column(text: str, name: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError as error:
        raise ConfigError(f"{name}: the column name {text} is not a JSON string: {error}") from None


def _shown(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, _PLAIN):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=_as_json)
    except (TypeError, ValueError, RecursionError):
        kind = type(value).__name__
        raise ValidationError(f"column {column!r} holds {kind}, which is no text for a prompt") from None


def _as_json(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return str(value)
    raise TypeError
