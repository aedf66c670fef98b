# SPDX-License-Identifier: Apache-2.0
"""JSON Schema's regular expressions (ECMA-262, flag u) in the grammar library's syntax (Rust's regex), and its formats.

Invariant: the result matches what the original matches, or the expression is refused: an escape or group that the two
interpret differently is never passed on. Anchors, quantifiers and alternatives are the same in both. The expression of
a format matches what its RFC allows and nothing else, except leap seconds, allowed if the time is in UTC, and year 0,
not allowed. Formats of the standard that are missing here are refused; unknown formats are ignored (JSON Schema
2020-12, validation, 7.2.3).

Source: ECMA-262 (2024), 22.2.1 and 22.2.2; syntax of the Rust crate `regex` 1.11.
"""

from __future__ import annotations

import re

WHITE_SPACE = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
ANY = r"[\s\S]"
ANY_BUT_LINE_ENDS = r"[^\n\r\u{2028}\u{2029}]"
NEGATED = frozenset("DWSP")
_QUANTIFIER = re.compile(r"\{\d+(,\d*)?\}")
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\})")
_PROPERTY = re.compile(r"\\([pP])\{[A-Za-z_=0-9]+\}")
_NAME = re.compile(r"<[A-Za-z_][A-Za-z0-9_]*>")
_CONTROLS = {"t": r"\t", "n": r"\n", "r": r"\r", "v": r"\u{b}", "f": r"\u{c}", "0": r"\u{0}"}


class RegexError(ValueError):
    """The expression has no equivalent; the message names the part."""


def to_rust(pattern: str) -> str:
    """Return the same expression in Rust's syntax.

    Raises:
        RegexError: it has a lookaround, a backreference or a word boundary, or is invalid.
    """
    return _RegexReader(pattern).read()


class _RegexReader:
    """Reader of one expression."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0

    def read(self) -> str:
        parts: list[str] = []
        while self._place < len(self._pattern):
            parts.append(self._item())
        return "".join(parts)

    def _item(self) -> str:
        char = self._pattern[self._place]
        if char == "\\":
            return self._escape(in_class=False)[0]
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        if char == "{":
            return self._quantifier()
        self._place += 1
        if char == ".":
            return ANY_BUT_LINE_ENDS
        return char if char in "^$*+?)|" else _literal(char)

    def _group(self) -> str:
        self._place += 1
        if not self._pattern.startswith("?", self._place):
            return "(?:"
        if self._pattern.startswith("?:", self._place):
            self._place += 2
            return "(?:"
        name = _NAME.match(self._pattern, self._place + 1)
        if name is None:
            raise RegexError(f"(?{self._pattern[self._place + 1 : self._place + 3]} is not supported")
        self._place = name.end()
        return "(?:"

    def _quantifier(self) -> str:
        found = _QUANTIFIER.match(self._pattern, self._place)
        if found is None:
            raise RegexError("a { that stands for itself must be written \\{")
        self._place = found.end()
        return found[0]

    def _escape(self, *, in_class: bool) -> tuple[str, bool]:
        """Return the meaning of an escape, and whether it is one character."""
        code = _CODE.match(self._pattern, self._place)
        if code is not None:
            self._place = code.end()
            return _literal(self._code_point(int(next(filter(None, code.groups())), 16))), True
        name = _PROPERTY.match(self._pattern, self._place)
        if name is not None:
            self._place = name.end()
            return name[0], False
        char = self._pattern[self._place + 1 : self._place + 2]
        self._place += 2
        return self._short_escape(char, in_class)

    def _short_escape(self, char: str, in_class: bool) -> tuple[str, bool]:
        if char in ("d", "D", "w", "W"):
            return f"\\{char}", False
        if char in ("s", "S"):
            return f"[{'^' if char == 'S' else ''}{WHITE_SPACE}]", False
        if char == "b" and in_class:
            return r"\u{8}", True
        if char == "c" and self._place < len(self._pattern) and self._pattern[self._place].isascii():
            return self._control(), True
        if char == "0" and self._pattern[self._place : self._place + 1].isdigit():
            raise RegexError("octal escapes are not supported")
        if char in _CONTROLS:
            return _CONTROLS[char], True
        if char and char.isascii() and not char.isalnum() and char != "_":
            return _literal(char), True
        raise RegexError(f"\\{char} is not supported" if char else "it ends with a backslash")

    def _control(self) -> str:
        letter = self._pattern[self._place]
        if not letter.isalpha():
            raise RegexError(f"\\c{letter} is not supported")
        self._place += 1
        return f"\\u{{{ord(letter) % 32:x}}}"

    def _code_point(self, first: int) -> str:
        """Return a character, which may be written as two surrogates."""
        if not 0xD800 <= first < 0xE000:
            if first > 0x10FFFF:
                raise RegexError(f"there is no character {first:#x}")
            return chr(first)
        second = _CODE.match(self._pattern, self._place)
        low = int(second[2], 16) if second is not None and second[2] else 0
        if first >= 0xDC00 or not 0xDC00 <= low < 0xE000 or second is None:
            raise RegexError("half of a surrogate pair is not a character")
        self._place = second.end()
        return chr(0x10000 + ((first - 0xD800) << 10) + (low - 0xDC00))

    def _class(self) -> str:
        self._place += 1
        start = "[^" if self._pattern.startswith("^", self._place) else "["
        self._place += len(start) - 1
        if self._pattern.startswith("]", self._place):
            self._place += 1
            if start == "[":
                raise RegexError("[] matches nothing")
            return ANY
        parts: list[str] = []
        while not self._pattern.startswith("]", self._place):
            parts.append(self._class_item())
        self._place += 1
        return f"{start}{''.join(parts)}]"

    def _class_item(self) -> str:
        """Return a character, a range, or an escape for several characters."""
        first, is_char = self._class_atom()
        is_range = self._pattern.startswith("-", self._place) and self._pattern[self._place + 1 :][:1] != "]"
        if not is_range or not is_char:
            return first
        self._place += 1
        last, is_char = self._class_atom()
        return f"{first}-{last}" if is_char else f"{first}\\-{last}"

    def _class_atom(self) -> tuple[str, bool]:
        if self._place >= len(self._pattern):
            raise RegexError("a [ is not closed")
        char = self._pattern[self._place]
        if char == "\\":
            return self._escape(in_class=True)
        self._place += 1
        return _literal(char), True


def _literal(char: str) -> str:
    """Return a character that stands for itself, inside and outside of brackets."""
    return char if char.isalnum() and char.isascii() else f"\\u{{{ord(char):x}}}"


_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
DATE = f"(?:{_YEAR}-(?:{_LONG_MONTH}|{_SHORT_MONTH}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = "(?:[.][0-9]+)?"
TIME = f"(?:{_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}(?:[Zz]|[-+]{_HOUR_MINUTE})|23:59:60{_FRACTION}(?:[Zz]|[-+]00:00))"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = f"(?:{_OCTET}[.]){{3}}{_OCTET}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{IPV4})"


def _ipv6() -> str:
    """Return RFC 3986, section 3.2.2: the allowed numbers of groups before and after the two colons."""
    before = ["", f"(?:{_H16})?", *(f"(?:(?:{_H16}:){{0,{count}}}{_H16})?" for count in range(1, 7))]
    behind = [*(f"(?:{_H16}:){{{count}}}{_LS32}" for count in range(5, 0, -1)), _LS32, _H16, ""]
    pairs = [f"{left}::{right}" for left, right in zip(before, behind, strict=True)]
    return f"(?:(?:{_H16}:){{6}}{_LS32}|{'|'.join(pairs)})"


IPV6 = _ipv6()
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"(?:[ !#-\u{5b}\u{5d}-~]|\u{5c}[ -~])*"'
_DOMAIN = f"(?:{_LABEL}(?:[.]{_LABEL})*|\\u{{5b}}(?:{IPV4}|IPv6:{IPV6})\\u{{5d}})"
EMAIL = f"(?:{_ATOM}(?:[.]{_ATOM})*|{_QUOTED})@{_DOMAIN}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

AS_PATTERN = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}[Tt]{TIME}",
    "ipv6": IPV6,
    "email": EMAIL,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
"""Format -> expression in Rust's syntax for the whole string."""

LIBRARY = frozenset({"duration", "hostname", "ipv4", "uuid", "uri"})
"""Formats that the grammar library enforces as the standard defines them."""

REFUSED = frozenset(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-reference", "uri-template"}
)
"""Formats of the standard that are not enforced, and so refused."""
