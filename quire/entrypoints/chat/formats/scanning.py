# SPDX-License-Identifier: Apache-2.0
"""Scanners for streamed text: markers, the end of a call, and patterns of unquoted strings; and the events of an
answer.

Invariant: each piece is scanned once, so the cost is linear in the length. A call's end is found by structure where
possible, so markers inside of strings are ignored. Plain text is a `str` event.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from quire.entrypoints.chat.formats.constraint import ANNOTATIONS, Schema, UnenforceableError
from quire.json_schema.ecma_regex import AS_PATTERN, LIBRARY, REFUSED, RegexError, to_rust
from quire.outputs import ToolCall as ToolCall

Tools = Mapping[str, Mapping[str, Any]]  # Tools of the request: name -> JSON schema of its arguments.

ANY = "(?s:.)*"
LENGTHS = frozenset({"minLength", "maxLength"})
EXPRESSIONS = frozenset({"pattern", "format"})
MAX_HEAD_CHARS = 1024  # Limit of what precedes a call's arguments: its name and the markers around it.
MAX_SPACE = 64  # Limit of white space between the end of the last value and the end of its call.
JSON_OUTSIDE = re.compile(r'["{}\[\]]')
PYTHON_OUTSIDE = re.compile(r"[\"'(){}\[\]]")
IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote as reasoning."""

    text: str


Event = str | Reasoning | ToolCall


def text_pattern(schema: Schema, char: str = "(?s:.)") -> str:
    """Return the expression, in Rust's syntax, of a schema's strings.

    Args:
        char: expression of one character in this syntax.

    Raises:
        UnenforceableError: the schema cannot be expressed.
    """
    others = sorted(schema.keys() - ANNOTATIONS - LENGTHS - EXPRESSIONS - {"type"})
    if others:
        raise UnenforceableError(f"the keyword {others[0]} of a string")
    expression = next(_expressions(schema), None)
    has_length = bool(schema.keys() & LENGTHS)
    if expression is None:
        return f"(?:{char}){_counts(schema)}" if has_length else f"(?:{char})*"
    if has_length or len(list(_expressions(schema))) > 1 or char != "(?s:.)":
        raise UnenforceableError("the keyword pattern or format of a string, beside others or in quotes")
    return expression


def _counts(schema: Schema) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if type(least) is not int or least < 0 or type(most) not in (int, str) or (most != "" and most < least):
        raise UnenforceableError("minLength or maxLength, which must be integers in order")
    return f"{{{least},{most}}}"


def _expressions(schema: Schema) -> Iterator[str]:
    if "pattern" in schema:
        yield _searched(str(schema["pattern"]))
    name = schema.get("format")
    if name in LIBRARY or name in REFUSED:
        raise UnenforceableError(f"the format {name}")
    if name in AS_PATTERN:
        yield AS_PATTERN[name]


def _searched(pattern: str) -> str:
    """Return an expression for strings that contain a match, as in JSON Schema; anchors may stand at the ends only."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and "|" in re.sub(r"\(.*\)|\[[^\]]*\]|\\.", "", inner, flags=re.DOTALL):
        raise UnenforceableError("a pattern with anchors and alternatives")
    if re.search(r"[\^$]", re.sub(r"\[[^\]]*\]|\\.", "", inner, flags=re.DOTALL)):
        raise UnenforceableError("a pattern with anchors inside")
    try:
        return f"{'' if begins else ANY}(?:{to_rust(inner)}){'' if ends else ANY}"
    except RegexError as error:
        raise UnenforceableError(f"a pattern: {error}") from None


class Markers:
    """Set of strings to search for. If one is a prefix of another, the longer one wins, so more text may be needed.

    Invariant: the cost of a piece of text is linear in its length, whatever came before it.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = tuple(dict.fromkeys(marker for marker in markers if marker))
        longest_first = sorted(self.markers, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        firsts = "".join(sorted({marker[0] for marker in self.markers}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        self._longest = max(map(len, self.markers), default=0)

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(*markers: str) -> Markers:
        """Return a cached instance, since every call of an answer searches for some markers."""
        return Markers(markers)

    def find(self, text: str) -> re.Match[str] | None:
        """Return the first marker in the text, unless more text could extend it to a longer one."""
        found = self._whole.search(text)
        return found if found is None or not self.may_begin(text[found.start() :]) else None

    def count(self, text: str) -> int:
        """Count the markers in the whole text."""
        return len(self._whole.findall(text))

    def scan(self, text: str) -> tuple[re.Match[str] | None, int]:
        """Return the first marker; without one, the length of the text's end that may begin a marker."""
        if self._first.search(text) is None:
            return None, 0
        found = self.find(text)
        return found, 0 if found else self.num_open(text)

    def at(self, text: str) -> str | None:
        """Return the marker that the text begins with, unless more text could extend it to a longer one."""
        found = self._whole.match(text)
        return found.group() if found and not self.may_begin(text) else None

    def may_begin(self, text: str) -> bool:
        """Return whether the text is a proper prefix of a marker."""
        size = len(text)
        return size < self._longest and any(
            size < len(marker) and marker.startswith(text) for marker in self.markers
        )

    def num_open(self, text: str) -> int:
        """Return the length of the longest end of the text that is a proper prefix of a marker."""
        found = self._first.search(text, max(0, len(text) - self._longest + 1))
        while found is not None:
            if self.may_begin(text[found.start() :]):
                return len(text) - found.start()
            found = self._first.search(text, found.start() + 1)
        return 0


class CallEnd(Protocol):
    """Finder of the end of one call."""

    def take(self, text: str) -> int | None:
        """Return the index in this piece behind the call's end, or where it is certain that there is none; else None.

        The index is negative for an end before the piece.
        """
        ...


class BracketEnd:
    """Finds the bracket that closes the first one; brackets in strings do not count.

    Args:
        outside: matches brackets and quotes outside of strings.
        inside: quote -> expression of that quote and the backslash inside of a string.
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
        """Process a quote or bracket; True if it closed the first bracket."""
        if self._quote:
            self._escaped = char == "\\"
            self._quote = self._quote if self._escaped else ""
        elif char in "\"'":
            self._quote = char
        else:
            self._depth += 1 if char in "([{" else -1
            return self._depth <= 0
        return False


def json_end() -> BracketEnd:
    """Return the end finder of a JSON object or array."""
    return BracketEnd(JSON_OUTSIDE, IN_STRING)


def python_end() -> BracketEnd:
    """Return the end finder of a Python call, `name(...)`."""
    return BracketEnd(PYTHON_OUTSIDE, IN_STRING)


class HeadedJsonEnd:
    """Finds the end of the JSON object after a short head without braces."""

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
    """Finds a marker outside of strings whose quotes are literals without escapes."""

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
    """Finds a marker; after values, only the one right behind a value's end, since values may hold the marker.

    Args:
        head: matches what may precede the first marker, and any prefix of that; other text is not a call.
        close: ends the call.
        value_open: begins a value, or the key before it.
        value_close: ends a value; only white space may stand between the last one and `close`.
        outer: ends the section, and after a value also a call whose `close` is missing.
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
        self._held = ""  # End of the earlier text, if it may begin a searched marker.

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
        """Return whether the head, or the marker that ends it, may be incomplete."""
        return len(text) <= MAX_HEAD_CHARS and (
            position == len(text) or self._first.may_begin(text[position:])
        )

    def _hold(self, text: str, num_chars: int) -> None:
        self._held = text[len(text) - num_chars :]

    def _num_unfinished(self, text: str) -> int:
        """Return the length of the text's end that may begin the last value's end and the marker behind it."""
        start = text.rfind(self._value_close.markers[0])
        if start >= 0 and (found := self._unfinished.match(text, start)) is not None:
            rest = text[found.end() :]
            if not rest or self._close.may_begin(rest):
                return len(text) - start
        return self._value_close.num_open(text)
