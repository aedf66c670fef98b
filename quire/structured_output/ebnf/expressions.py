# SPDX-License-Identifier: Apache-2.0
r"""Expressions in Rust's regex dialect, integer ranges and free text in xgrammar's EBNF.

Invariant: a rule matches what the expression matches; unsupported syntax is refused. Supported are characters,
escapes, `.`, classes without set operations, groups, alternatives, quantifiers, anchors at the ends of the outermost
alternatives, `\d`, `\s`, and `\w` in ASCII. The ranges of a `CharSet` are sorted and disjoint and contain no
surrogates.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from quire.json_schema.ecma_regex import RegexError
from quire.structured_output.backend import GrammarError

CharSet = tuple[tuple[int, int], ...]  # (first, last) of each range
ALL: CharSet = ((0, 0xD7FF), (0xE000, 0x10FFFF))
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""Unicode whitespace."""


def char_set(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """Return the characters of ranges that may overlap."""
    return complement(_gaps(ranges))


def of_text(chars: Iterable[str]) -> CharSet:
    return char_set((ord(char), ord(char)) for char in chars)


def complement(chars: Iterable[tuple[int, int]]) -> CharSet:
    return tuple(_gaps([*chars, (0xD800, 0xDFFF)]))


def intersection(one: CharSet, other: CharSet) -> CharSet:
    return complement((*complement(one), *complement(other)))


def written(chars: CharSet) -> str:
    """Return a character class of EBNF."""
    ends = (_char(first) if first == last else f"{_char(first)}-{_char(last)}" for first, last in chars)
    return f"[{''.join(ends)}]"


def quoted(text: str) -> str:
    """Return a literal of EBNF."""
    return f'"{"".join(_char(ord(char)) for char in text)}"'


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\U{code:08X}"


def _gaps(ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Yield the gaps between ranges, from the first code point to the last."""
    free = 0
    for first, last in sorted(ranges):
        if first > free:
            yield free, first - 1
        free = max(free, last + 1)
    if free <= 0x10FFFF:
        yield free, 0x10FFFF


_PLAIN = complement(((0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))))
_ESCAPED = [*map(chr, range(0x20)), '"', "\\"]


def in_json(chars: CharSet) -> str:
    """Return the class within a JSON string, where each character has one spelling."""
    plain = intersection(chars, _PLAIN)
    lasts: dict[str, list[str]] = {}
    for char in _ESCAPED:
        if intersection(chars, of_text(char)):
            spelling = json.dumps(char)[1:-1]
            lasts.setdefault(spelling[:-1], []).append(spelling[-1])
    escaped = [f"{quoted(head)} {written(of_text(last))}" for head, last in lasts.items()]
    return f"({' | '.join([written(plain)] * bool(plain) + escaped)})"


def refusal(what: str) -> GrammarError:
    """Return the error for something that another backend may support."""
    return GrammarError(f"the xgrammar backend does not support {what}; the guidance backend may")


class Rules:
    """Rules by name, with distinct bodies."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def define(self, body: str) -> str:
        """Return the name of the rule with that body."""
        if body not in self._names:
            self._names[body] = self.reserve()
            self._bodies[self._names[body]] = body
        return self._names[body]

    def reserve(self) -> str:
        """Return a name whose rule follows by `complete`; others may refer to it."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def complete(self, name: str, body: str) -> None:
        self._bodies[name] = body

    def grammar(self, start: str) -> str:
        return "\n".join(f"{name} ::= {body}" for name, body in {"root": start, **self._bodies}.items())


def integers(low: int | None, high: int | None) -> str:
    """Return a rule body for integers from `low` to `high` inclusive; None is no bound. No leading zeros, and 0 has no
    sign.
    """
    assert low is None or high is None or low <= high
    parts = []
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    if low is None or low < 0:
        parts.append(f'"-" ({_naturals(max(1, -(high or 0)), None if low is None else -low)})')
    return " | ".join(parts)


def _naturals(low: int, high: int | None) -> str:
    """Return a body for each number of digits."""
    least, most = len(str(low)), len(str(low if high is None else high))
    parts = []
    for size in range(least, most + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        last = 10**size - 1 if high is None else min(high, 10**size - 1)
        parts.append(_between(str(first), str(last)))
    if high is None:
        parts.append(f"[1-9] [0-9]{{{least},}}")
    return " | ".join(parts)


def _between(low: str, high: str) -> str:
    """Return a body for `low` to `high`, which have equally many digits."""
    if low[:1] == high[:1]:
        return f'"{low[0]}" {_between(low[1:], high[1:])}' if low else '""'
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return f"[{first}-{last}] {_any(rest)}"
    parts = [f'"{first}" {_between(low[1:], "9" * rest)}', f'"{last}" {_between("0" * rest, high[1:])}']
    if first + 1 < last:
        parts.append(f"[{first + 1}-{last - 1}] {_any(rest)}")
    return f"({' | '.join(parts)})"


def _any(size: int) -> str:
    return f"[0-9]{{{size},{size}}}" if size else '""'


State = tuple[str, bool]  # matched prefix of the stop texts, and whether only whitespace was read so far


class Scanner:
    """Free text that contains none of `stops` except at its end, as one rule per automaton state.

    Source: A. Aho and M. Corasick, "Efficient string matching" (1975).

    Args:
        stops: text -> what follows it; None: the text is forbidden.
        anywhere: rules that may follow at any position.
        may_end: True if the text may end without any of these.
        not_first: characters that it does not start with, after whitespace.
    """

    def __init__(
        self,
        rules: Rules,
        stops: Mapping[str, str | None],
        anywhere: Sequence[str],
        *,
        may_end: bool,
        not_first: str = "",
    ) -> None:
        self._rules = rules
        self._stops = stops
        self._exits = [*anywhere, *['""'] * may_end]
        self._not_first = not_first
        self._states: dict[State, str] = {}
        self._open: list[State] = []

    def rule(self, name: str) -> None:
        """Write the automaton; the reserved rule `name` is its first state."""
        first: State = ("", bool(self._not_first))
        self._states[first] = name
        self._open.append(first)
        while self._open:
            state = self._open.pop()
            self._rules.complete(self._states[state], " | ".join(self._ways(state)))

    def _ways(self, state: State) -> list[str]:
        read, is_fresh = state
        chars = {char for stop in self._stops for char in stop}
        if is_fresh:
            chars |= {*self._not_first, *WHITE_SPACE}
        ways, classes = [*self._exits], defaultdict(list)
        for char in sorted(chars):
            found = next((stop for stop in self._stops if (read + char).endswith(stop)), None)
            if is_fresh and char in self._not_first:
                continue
            if found is None:
                classes[self._longest(read + char), is_fresh and char in WHITE_SPACE].append(char)
            elif (rest := self._stops[found]) is not None:
                ways.append(f"{written(of_text(char))} {rest}")
        ways += [f"{written(of_text(some))} {self._named(to)}" for to, some in classes.items()]
        return [*ways, f"{written(complement(of_text(chars)))} {self._named(('', False))}"]

    def _longest(self, read: str) -> str:
        """Return the longest suffix of what was read that starts one of the texts."""
        ends = (read[place:] for place in range(len(read) + 1))
        return next(end for end in ends if any(stop.startswith(end) for stop in self._stops) or not end)

    def _named(self, state: State) -> str:
        if state not in self._states:
            self._states[state] = self._rules.reserve()
            self._open.append(state)
        return self._states[state]


_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,6})\})")
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d+)(?:(,)(\d*))?\})\??")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}


def text_rule(pattern: str) -> str:
    r"""Return a rule body for texts that match completely; `\d` is any Unicode digit.

    Raises:
        RegexError: the expression is invalid or not supported.
    """
    return _ExpressionReader(pattern, written, _of_unicode(), '""').read()


def string_rule(pattern: str) -> str:
    r"""Return a rule body for JSON string contents that match somewhere.

    `\d` and `\w` are ASCII, as in JSON Schema.

    Raises:
        RegexError: see `text_rule`.
    """
    return _ExpressionReader(pattern, in_json, _of_ascii(), f"{in_json(ALL)}*").read()


@cache
def _of_ascii() -> dict[str, CharSet]:
    digits = char_set([(ord("0"), ord("9"))])
    word = char_set([*digits, (ord("A"), ord("Z")), (ord("a"), ord("z")), (ord("_"), ord("_"))])
    return {**_classes(digits), "w": word, "W": complement(word)}


@cache
def _of_unicode() -> dict[str, CharSet]:
    """Return the Unicode classes, without word characters, which Python and Rust define differently."""
    chars = map(chr, range(sys.maxunicode + 1))
    return _classes(of_text(char for char in chars if unicodedata.category(char) == "Nd"))


def _classes(digits: CharSet) -> dict[str, CharSet]:
    space = of_text(WHITE_SPACE)
    return {"d": digits, "D": complement(digits), "s": space, "S": complement(space)}


class _ExpressionReader:
    """Reader of one expression."""

    def __init__(
        self, pattern: str, write: Callable[[CharSet], str], classes: dict[str, CharSet], around: str
    ) -> None:
        self._pattern = pattern
        self._place = 0
        self._write = write
        self._classes = classes
        self._around = around

    def read(self) -> str:
        body = self._alternatives(is_outer=True)
        if self._place < len(self._pattern):
            raise RegexError("a ) closes nothing")
        return body

    def _next(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._place)
        self._place += len(text) * found
        return found

    def _alternatives(self, *, is_outer: bool = False) -> str:
        parts = [self._sequence(is_outer)]
        while self._take("|"):
            parts.append(self._sequence(is_outer))
        return " | ".join(parts)

    def _sequence(self, is_outer: bool) -> str:
        items = [self._around] if is_outer and not self._take("^") else []
        while self._next() not in ("", "|", ")"):
            if is_outer and self._take("$"):
                if self._next() not in ("", "|"):
                    raise RegexError("the anchor $ is supported at the end only")
                return " ".join(items) or '""'
            items.append(self._repeated())
        return " ".join(items + [self._around] * is_outer) or '""'

    def _repeated(self) -> str:
        atom = self._atom()
        found = _QUANTIFIER.match(self._pattern, self._place)
        if found is None:
            return atom
        self._place = found.end()
        mark, least, comma, most = found.groups()
        if mark:
            return f"{atom}{mark}"
        most = most if comma else least
        if most and int(most) < int(least):
            raise RegexError(f"{found[0]} has no number of times")
        return f"{atom}{{{least},{most}}}" if most != "0" else '""'

    def _atom(self) -> str:
        if self._take("(?:") or (not self._pattern.startswith("(?", self._place) and self._take("(")):
            body = self._alternatives()
            if not self._take(")"):
                raise RegexError("a ( is not closed")
            return f"({body})"
        if self._take("["):
            return self._written(self._class())
        if self._take("."):
            return self._written(complement(of_text("\n")))
        if self._next() in "(^$*+?{}]":
            raise RegexError(f"{self._pattern[self._place : self._place + 4]} is not supported")
        chars, _ = self._char()
        return self._written(chars)

    def _written(self, chars: CharSet) -> str:
        if not chars:
            raise RegexError("a class of no characters matches nothing")
        return self._write(chars)

    def _char(self) -> tuple[CharSet, bool]:
        """Return a character or an escape, and whether it is one character."""
        code = _CODE.match(self._pattern, self._place)
        if code is not None:
            self._place = code.end()
            number = int(next(filter(None, code.groups())), 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise RegexError(f"there is no character {number:#x}")
            return of_text(chr(number)), True
        char = self._next()
        self._place += 1
        if char != "\\":
            return of_text(char), True
        char = self._next()
        self._place += 1
        if char in self._classes:
            return self._classes[char], False
        if char in _CONTROLS:
            return of_text(_CONTROLS[char]), True
        if char and char.isascii() and not char.isalnum() and char not in "<>":
            return of_text(char), True
        raise RegexError(f"\\{char} is not supported" if char else "it ends with a backslash")

    def _class(self) -> CharSet:
        is_negated = self._take("^")
        chars: list[tuple[int, int]] = []
        begin = self._place
        while self._place == begin or not self._take("]"):
            chars.extend(self._class_item(begin))
        return complement(chars) if is_negated else char_set(chars)

    def _class_item(self, begin: int) -> CharSet:
        """Return a character, a range, or an escape for several characters."""
        here = self._pattern[self._place : self._place + 2]
        if here[:1] == "[" and here != "[:":
            self._place += 1
            return self._class()
        if not here or here[0] in "[]" or here in ("&&", "--", "~~"):
            raise RegexError("a [ is not closed" if not here else f"{here} in a class is not supported")
        if here[0] == "-" and self._place > begin and here[1:] != "]":
            raise RegexError("a - in a class that is no range must be written \\-")
        first, is_char = self._char()
        if self._next() != "-" or self._pattern[self._place + 1 : self._place + 2] == "]":
            return first
        self._place += 1
        if self._next() in ("", "["):
            raise RegexError("a range in a class has no end")
        last, is_also = self._char()
        if not (is_char and is_also) or first > last:
            raise RegexError("a range in a class has to go from one character to a later one")
        return ((first[0][0], last[0][0]),)
