"""What a reply says about its request: fields that had no effect, and values that were changed.

Invariant: names come from clients and the lists are bounded, so notes are safe in a header and cost next to nothing.
What is not named is counted.
"""

from __future__ import annotations

import difflib
import json
import string
from collections.abc import Iterable, Mapping

from quire.errors import ValidationError

Adjusted = int | str | bool
"""A value that was taken in place of the client's."""
IGNORED_HEADER = "x-quire-ignored-fields"
ADJUSTED_HEADER = "x-quire-adjusted-fields"
MAX_NOTES = 32
MAX_COUNTED = 1000
"""Of those beyond."""
MAX_NAME_CHARS = 64
_HEADER_CHARS = frozenset(string.ascii_letters + string.digits + "_-.[]")


class Notes:
    """Collects the notes on one request.

    Args:
        reject: fields without effect are refused instead (`--unknown-fields reject`).
    """

    def __init__(self, *, reject: bool = False) -> None:
        self._reject = reject
        self.names: Mapping[str, str] = {}
        """Names of fields, to those that the client knows, where its request was made into another."""
        self._named: list[str] = []
        self._others: set[str] = set()
        self.adjusted: dict[str, Adjusted] = {}

    def ignore(self, field: str, honoured: Iterable[str] = ()) -> None:
        """Note a field without effect; a member of a list is named with `[]`, so that many are one note.

        Args:
            honoured: the names that would have had an effect in its place.

        Raises:
            ValidationError: such fields are to be refused.
        """
        field = _shortened(self.names.get(field, field))
        if self._reject:
            raise _unknown(field, honoured)
        if field in self._named:
            return
        if len(self._named) < MAX_NOTES:
            self._named.append(field)
        elif len(self._others) < MAX_COUNTED:
            self._others.add(field)

    @property
    def ignored(self) -> list[str]:
        """Fields without effect, and how many more there are than are named."""
        return [*self._named, *self._number_of_others]

    @property
    def _number_of_others(self) -> list[str]:
        if not self._others:
            return []
        is_all = len(self._others) < MAX_COUNTED
        return [f"and {len(self._others)} more" if is_all else f"and {MAX_COUNTED} or more"]

    def adjust(self, field: str, value: Adjusted) -> None:
        """Note the value that was taken instead of the one that was sent; of many fields the first `MAX_NOTES`."""
        field = self.names.get(field, field)
        if field in self.adjusted or len(self.adjusted) < MAX_NOTES:
            self.adjusted[field] = value

    def headers(self, *, is_error: bool) -> list[tuple[bytes, bytes]]:
        """The notes as response headers; a name that is no word is masked. Nothing was taken for a request refused."""
        words = [name if name and _HEADER_CHARS.issuperset(name) else "?" for name in self._named]
        words += self._number_of_others
        values = [] if is_error else [f"{name}={_in_header(value)}" for name, value in self.adjusted.items()]
        told = ((IGNORED_HEADER, ", ".join(words)), (ADJUSTED_HEADER, ", ".join(values)))
        return [(name.encode(), text.encode()) for name, text in told if text]


def _in_header(value: Adjusted) -> str:
    """The value as JSON, or a mask for text that a header cannot hold."""
    text = json.dumps(value)
    return text if len(text) <= MAX_NAME_CHARS and text.isprintable() and "," not in text else "?"


def _shortened(field: str) -> str:
    return field if len(field) <= MAX_NAME_CHARS else field[: MAX_NAME_CHARS - 3] + "..."


def _unknown(field: str, honoured: Iterable[str]) -> ValidationError:
    near = difflib.get_close_matches(field.rpartition(".")[2], honoured, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValidationError(f"unknown field {field!r}{hint}", param=field)
