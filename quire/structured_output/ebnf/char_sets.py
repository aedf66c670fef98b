"""Sets of characters as ranges of code points, and how xgrammar's EBNF writes characters.

Invariant: a set's ranges are sorted, apart from each other, and hold no surrogates, which no text has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

CharSet = tuple[tuple[int, int], ...]
"""(first, last) of each range."""
ALL: CharSet = ((0, 0xD7FF), (0xE000, 0x10FFFF))
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""As Unicode has it."""


def char_set(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """The characters of ranges that may overlap."""
    return complement(_gaps(ranges))


def of_text(chars: Iterable[str]) -> CharSet:
    return char_set((ord(char), ord(char)) for char in chars)


def complement(chars: Iterable[tuple[int, int]]) -> CharSet:
    return tuple(_gaps([*chars, (0xD800, 0xDFFF)]))


def intersection(one: CharSet, other: CharSet) -> CharSet:
    return complement((*complement(one), *complement(other)))


def written(chars: CharSet) -> str:
    """A class of EBNF."""
    ends = (_char(first) if first == last else f"{_char(first)}-{_char(last)}" for first, last in chars)
    return f"[{''.join(ends)}]"


def quoted(text: str) -> str:
    """A literal of EBNF."""
    return f'"{"".join(_char(ord(char)) for char in text)}"'


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\U{code:08X}"


def _gaps(ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """What lies between ranges, from the first code point to the last."""
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
    """The same class within a string of JSON, where each character has one spelling."""
    plain = intersection(chars, _PLAIN)
    lasts: dict[str, list[str]] = {}
    for char in _ESCAPED:
        if intersection(chars, of_text(char)):
            spelling = json.dumps(char)[1:-1]
            lasts.setdefault(spelling[:-1], []).append(spelling[-1])
    escaped = [f"{quoted(head)} {written(of_text(last))}" for head, last in lasts.items()]
    return f"({' | '.join([written(plain)] * bool(plain) + escaped)})"
