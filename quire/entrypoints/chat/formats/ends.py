"""Where a call ends, found while its text arrives.

Invariant: each piece is looked at once, so a long argument costs time linear in its length. An end is by structure and
not by a marker wherever the structure tells, so markers inside of strings mean nothing.
"""

from __future__ import annotations

import re
from typing import Protocol

from quire.entrypoints.chat.formats.markers import Markers

MAX_HEAD_CHARS = 1024
"""Of what stands before a call's arguments: its name and the markers around it."""
MAX_SPACE = 64
"""White space between the end of the last value and that of its call."""


class End(Protocol):
    """Looks for the end of one call."""

    def take(self, text: str) -> int | None:
        """The index in this piece behind the call's end, or where it is clear that there is none; None if neither.

        It is negative for what came before the piece.
        """
        ...


class BracketEnd:
    """The bracket that closes the first one; brackets in strings do not count.

    Args:
        outside: matches what changes the state outside of strings: brackets and quotes.
        inside: quote -> what matters inside of such a string: the quote and the backslash.
    """

    def __init__(self, outside: re.Pattern[str], inside: dict[str, re.Pattern[str]]) -> None:
        self._outside = outside
        self._inside = inside
        self._quote = ""
        self._escaped = False
        self._depth = 0

    def take(self, text: str) -> int | None:
        position = 0
        while position < len(text):
            if self._escaped:
                self._escaped, position = False, position + 1
                continue
            found = (self._inside[self._quote] if self._quote else self._outside).search(text, position)
            if found is None:
                return None
            position = found.end()
            if self._turn(found.group()):
                return position
        return None

    def _turn(self, char: str) -> bool:
        """Take in a character that matters; True if it was the last one."""
        if self._quote:
            self._escaped = char == "\\"
            self._quote = self._quote if self._escaped else ""
        elif char in "\"'":
            self._quote = char
        else:
            self._depth += 1 if char in "([{" else -1
            return self._depth <= 0
        return False


JSON_OUTSIDE = re.compile(r'["{}\[\]]')
PYTHON_OUTSIDE = re.compile(r"[\"'(){}\[\]]")
IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


def json_end() -> BracketEnd:
    """Of a JSON object or array."""
    return BracketEnd(JSON_OUTSIDE, IN_STRING)


def python_end() -> BracketEnd:
    """Of a Python call, `name(...)`."""
    return BracketEnd(PYTHON_OUTSIDE, IN_STRING)


class HeadedEnd:
    """A short head without braces, and the JSON object behind it."""

    def __init__(self) -> None:
        self._json: BracketEnd | None = None
        self._num_head_chars = 0

    def take(self, text: str) -> int | None:
        start = 0
        if self._json is None:
            room = MAX_HEAD_CHARS - self._num_head_chars
            start = text.find("{", 0, room)
            if start < 0:
                self._num_head_chars += len(text)
                return None if len(text) < room else room
            self._json = json_end()
        end = self._json.take(text[start:])
        return None if end is None else start + end


class QuotedEnd:
    """A marker outside of strings, whose quotes are literals without escapes."""

    def __init__(self, close: str, quote: str) -> None:
        self._all = Markers.of(close, quote)
        self._quote = Markers.of(quote)
        self._quoted = False
        self._held = ""

    def take(self, text: str) -> int | None:
        joined, num_held, position = self._held + text, len(self._held), 0
        while True:
            looked_for = self._quote if self._quoted else self._all
            found = looked_for.find(joined[position:])
            if found is None:
                self._held = joined[len(joined) - looked_for.num_open(joined[position:]) :]
                return None
            position += found.end()
            if found.group() not in self._quote.markers:
                return position - num_held
            self._quoted = not self._quoted


class MarkerEnd:
    """A marker; in a call that has values, the one right behind a value's end, so that a value may hold the marker.

    Args:
        head: matches what may stand before the first marker, and the beginning of anything else; a text with more is
            no call, and is not waited for.
        close: ends the call.
        value_open: begins a value, or what is before it.
        value_close: ends one; only white space may be between the last one and `close`.
        outer: ends what is around the call, and behind a value, before it, the call whose `close` was forgotten.
    """

    def __init__(
        self, head: re.Pattern[str], close: str, value_open: str, value_close: str, outer: str = ""
    ) -> None:
        self._head = head
        self._value_open = value_open
        self._first = Markers.of(close, value_open)
        self._value_close = Markers.of(value_close)
        closes = "|".join([re.escape(close), *([f"(?={re.escape(outer)})"] if outer else [])])
        self._last = re.compile(rf"{re.escape(value_close)}\s{{0,{MAX_SPACE}}}(?:{closes})")
        self._unfinished = re.compile(rf"{re.escape(value_close)}\s{{0,{MAX_SPACE}}}")
        self._close = Markers.of(close, outer)
        self._has_values = False
        self._held = ""
        """The end of what came before, if it may be the beginning of what is looked for."""

    def take(self, text: str) -> int | None:
        joined, num_held = self._held + text, len(self._held)
        position = 0
        if not self._has_values:
            position = self._head_end(joined)
            marker = self._first.at(joined[position:])
            if marker is None and self._may_go_on(joined, position):
                self._held = joined
                return None
            position += len(marker or "")
            if marker != self._value_open:
                return position - num_held
            self._has_values = True
        last = self._last.search(joined, position)
        if last is not None:
            return last.end() - num_held
        self._hold(joined, self._num_unfinished(joined))
        return None

    def _head_end(self, text: str) -> int:
        found = self._head.match(text)
        return found.end() if found is not None else 0

    def _may_go_on(self, text: str, position: int) -> bool:
        """Whether the head, or the marker that ends it, may be incomplete."""
        return len(text) <= MAX_HEAD_CHARS and (
            position == len(text) or self._first.may_begin(text[position:])
        )

    def _hold(self, text: str, num_chars: int) -> None:
        self._held = text[len(text) - num_chars :]

    def _num_unfinished(self, text: str) -> int:
        """How much of the end may be the beginning of the last value's end and the marker behind it."""
        start = text.rfind(self._value_close.markers[0])
        if start >= 0 and (found := self._unfinished.match(text, start)) is not None:
            rest = text[found.end() :]
            if not rest or self._close.may_begin(rest):
                return len(text) - start
        return self._value_close.num_open(text)
