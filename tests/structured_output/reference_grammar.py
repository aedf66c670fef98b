# SPDX-License-Identifier: Apache-2.0
"""A tiny grammar engine, slow and plain: regular expressions over bytes by their derivatives.

Source: J. Brzozowski, "Derivatives of Regular Expressions" (1964). A token is allowed after a text if some match begins
with the text and the token; that is all there is to a mask.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from hypothesis import strategies as st


@dataclass(frozen=True)
class Never:
    """Matches nothing."""


@dataclass(frozen=True)
class Empty:
    """Matches the empty text."""


@dataclass(frozen=True)
class Byte:
    value: int


@dataclass(frozen=True)
class Then:
    first: Regex
    rest: Regex


@dataclass(frozen=True)
class Either:
    left: Regex
    right: Regex


@dataclass(frozen=True)
class Star:
    inner: Regex


Regex = Never | Empty | Byte | Then | Either | Star
NEVER, EMPTY = Never(), Empty()


def text(value: str) -> Regex:
    regex: Regex = EMPTY
    for byte in reversed(value.encode()):
        regex = then(Byte(byte), regex)
    return regex


def then(first: Regex, rest: Regex) -> Regex:
    if NEVER in (first, rest):
        return NEVER
    return rest if first == EMPTY else first if rest == EMPTY else Then(first, rest)


def either(left: Regex, right: Regex) -> Regex:
    return right if left in (NEVER, right) else left if right == NEVER else Either(left, right)


@cache
def matches_empty(regex: Regex) -> bool:
    if isinstance(regex, Then):
        return matches_empty(regex.first) and matches_empty(regex.rest)
    if isinstance(regex, Either):
        return matches_empty(regex.left) or matches_empty(regex.right)
    return isinstance(regex, Empty | Star)


@cache
def derivative(regex: Regex, byte: int) -> Regex:
    """Return the regex that must follow `byte`. It matches something, unless it is `NEVER` itself."""
    if isinstance(regex, Byte):
        return EMPTY if regex.value == byte else NEVER
    if isinstance(regex, Either):
        return either(derivative(regex.left, byte), derivative(regex.right, byte))
    if isinstance(regex, Star):
        return then(derivative(regex.inner, byte), regex)
    if isinstance(regex, Then):
        found = then(derivative(regex.first, byte), regex.rest)
        return either(found, derivative(regex.rest, byte)) if matches_empty(regex.first) else found
    return NEVER


def after(regex: Regex, data: bytes) -> Regex:
    for byte in data:
        regex = derivative(regex, byte)
    return regex


def allowed(regex: Regex, so_far: bytes, tokens: list[bytes]) -> set[int]:
    """Ids of the tokens that may follow, one by one."""
    here = after(regex, so_far)
    return {i for i, token in enumerate(tokens) if token and after(here, token) != NEVER}


Written = tuple[str, Regex]
"""An expression as people write it, and as it is here."""


def _choice(parts: list[Written]) -> Written:
    regex: Regex = NEVER
    for _, part in parts:
        regex = either(regex, part)
    return "(?:" + "|".join(written for written, _ in parts) + ")", regex


def _sequence(parts: list[Written]) -> Written:
    regex: Regex = EMPTY
    for _, part in reversed(parts):
        regex = then(part, regex)
    return "(?:" + "".join(written for written, _ in parts) + ")", regex


def _repeated(part: Written, mark: str) -> Written:
    written, regex = part
    many = {"*": Star(regex), "+": then(regex, Star(regex)), "?": either(regex, EMPTY)}
    return f"(?:{written}){mark}", many[mark]


def expressions(alphabet: list[str]) -> st.SearchStrategy[Written]:
    """Random expressions over some texts."""
    leaves = st.sampled_from(alphabet).map(lambda value: (re.escape(value), text(value)))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(_choice),
            st.lists(inner, min_size=1, max_size=3).map(_sequence),
            st.builds(_repeated, inner, st.sampled_from("*+?")),
        ),
        max_leaves=6,
    )
