# SPDX-License-Identifier: Apache-2.0
"""Notes of a reply on its request: ignored fields and adjusted values.

Invariant: names come from clients and the lists are bounded, so notes are safe in a header. Names beyond the bound are
counted.
"""

from __future__ import annotations

import difflib
import json
import string
from collections.abc import Iterable, Mapping

from quire.errors import ValidationError

Adjusted = int | str | bool  # Value used instead of the client's.
IGNORED_HEADER = "x-quire-ignored-fields"
ADJUSTED_HEADER = "x-quire-adjusted-fields"
MAX_NOTES = 32
MAX_COUNTED = 1000  # Largest count of further fields.
MAX_NAME_CHARS = 64
_HEADER_CHARS = frozenset(string.ascii_letters + string.digits + "_-.[]")


class RequestNotes:
    """Notes on one request.

    Args:
        reject: reject fields without effect (`--unknown-fields reject`).
    """

    def __init__(self, *, reject: bool = False) -> None:
        self._reject = reject
        # Renaming of fields to those of the client's API, where its request was translated.
        self.names: Mapping[str, str] = {}
        self._named: list[str] = []
        self._others: set[str] = set()
        self.adjusted: dict[str, Adjusted] = {}

    def ignore(self, field: str, honored: Iterable[str] = ()) -> None:
        """Record a field without effect. Members of a list share one name with `[]`.

        Args:
            honored: supported field names, for a suggestion.

        Raises:
            ValidationError: such fields are rejected.
        """
        field = _shortened(self.names.get(field, field))
        if self._reject:
            raise _unknown(field, honored)
        if field in self._named:
            return
        if len(self._named) < MAX_NOTES:
            self._named.append(field)
        elif len(self._others) < MAX_COUNTED:
            self._others.add(field)

    @property
    def ignored(self) -> list[str]:
        """Names of ignored fields, and the number of further ones."""
        return [*self._named, *self._number_of_others]

    @property
    def _number_of_others(self) -> list[str]:
        if not self._others:
            return []
        is_all = len(self._others) < MAX_COUNTED
        return [f"and {len(self._others)} more" if is_all else f"and {MAX_COUNTED} or more"]

    def adjust(self, field: str, value: Adjusted) -> None:
        """Record the value used instead of the client's, for at most `MAX_NOTES` fields."""
        field = self.names.get(field, field)
        if field in self.adjusted or len(self.adjusted) < MAX_NOTES:
            self.adjusted[field] = value

    def headers(self, *, is_error: bool) -> list[tuple[bytes, bytes]]:
        """Return the notes as response headers; unsafe names are masked. A rejected request has no adjusted values."""
        words = [name if name and _HEADER_CHARS.issuperset(name) else "?" for name in self._named]
        words += self._number_of_others
        values = [] if is_error else [f"{name}={_in_header(value)}" for name, value in self.adjusted.items()]
        headers = ((IGNORED_HEADER, ", ".join(words)), (ADJUSTED_HEADER, ", ".join(values)))
        return [(name.encode(), text.encode()) for name, text in headers if text]


def _in_header(value: Adjusted) -> str:
    """Return the value as JSON, or a mask for text that is not allowed in a header."""
    text = json.dumps(value)
    return text if len(text) <= MAX_NAME_CHARS and text.isprintable() and "," not in text else "?"


def _shortened(field: str) -> str:
    return field if len(field) <= MAX_NAME_CHARS else field[: MAX_NAME_CHARS - 3] + "..."


def _unknown(field: str, honored: Iterable[str]) -> ValidationError:
    near = difflib.get_close_matches(field.rpartition(".")[2], honored, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValidationError(f"unknown field {field!r}{hint}", param=field)
