"""Regular expressions, as the grammar library's dialect has them (Rust's regex), in xgrammar's EBNF.

Invariant: what is written matches what the expression matches; what is not on the list here is refused. The list:
characters, their escapes, `.`, classes without set operations, groups, alternatives, quantifiers, anchors at the ends
of the outermost alternatives, `\\d`, `\\s`, and `\\w` where it is ASCII.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable
from functools import cache

from quire.structured_output.ebnf.char_sets import (
    ALL,
    WHITE_SPACE,
    CharSet,
    char_set,
    complement,
    in_json,
    of_text,
    written,
)
from quire.structured_output.ecma_regex import RegexError

_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,6})\})")
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d+)(?:(,)(\d*))?\})\??")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}


def text_rule(pattern: str) -> str:
    """The body of a rule for the texts that match as a whole, in which `\\d` is any digit of Unicode.

    Raises:
        RegexError: the expression is no good, or not on the list.
    """
    return _Reader(pattern, written, _of_unicode(), '""').read()


def string_rule(pattern: str) -> str:
    """The body of a rule for what stands between the quotes of a string of JSON some part of which matches.

    Here `\\d` and `\\w` are ASCII, as JSON Schema has them.

    Raises:
        RegexError: as of `text_rule`.
    """
    return _Reader(pattern, in_json, _of_ascii(), f"{in_json(ALL)}*").read()


@cache
def _of_ascii() -> dict[str, CharSet]:
    digits = char_set([(ord("0"), ord("9"))])
    word = char_set([*digits, (ord("A"), ord("Z")), (ord("a"), ord("z")), (ord("_"), ord("_"))])
    return {**_classes(digits), "w": word, "W": complement(word)}


@cache
def _of_unicode() -> dict[str, CharSet]:
    """What a word character is, Python does not say as Rust does."""
    chars = map(chr, range(sys.maxunicode + 1))
    return _classes(of_text(char for char in chars if unicodedata.category(char) == "Nd"))


def _classes(digits: CharSet) -> dict[str, CharSet]:
    space = of_text(WHITE_SPACE)
    return {"d": digits, "D": complement(digits), "s": space, "S": complement(space)}


class _Reader:
    """Walks over an expression once."""

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
        """A character or an escape, and whether that is one character."""
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
        """A character, a range or an escape that stands for several characters."""
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
