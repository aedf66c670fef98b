"""How much one rendering of a chat template may make, in characters and items.

Invariant: whatever makes much out of little asks first, so nothing larger than `MAX_SIZE` is ever built, and no
single call keeps the interpreter busy for long.
"""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

MAX_SIZE = 2**25
"""Characters that one operation may make; a list's item counts for `ITEM`."""
MAX_TOTAL = 2**29
"""The same of all operations of a rendering together."""
CHEAPER = 16
"""Copying a character takes so much less than making one: a text that grows piece by piece is copied each time."""
WIDE = 4
"""Bytes that a character may take in a text that is not ASCII, of which each counts for so many."""
ITEM = 64
TURN = 128
CALL = 1024
"""What a turn of a loop costs, and a call: as many as there can be take a second or two."""


class TemplateRefusalError(TemplateError):
    """The template itself refused the conversation, or a rendering its template; its message is for the caller."""


class Budget:
    """What is left of `MAX_TOTAL`."""

    def __init__(self) -> None:
        self._left = MAX_TOTAL

    def spend(self, size: int, purpose: str, *, passing: bool = False) -> None:
        """Ask to make something. What is `passing` takes the place of what it is made from, and so costs time alone.

        Raises:
            TemplateRefusalError: so much is not to be made.
        """
        self._left -= size // CHEAPER if passing else size
        if size > MAX_SIZE or self._left < 0:
            raise TemplateRefusalError(f"{purpose} makes too much of what it is given")


def size_of(text: str) -> int:
    """Characters as they count."""
    return len(text) if text.isascii() else WIDE * len(text)


def weigh(value: Any) -> int:
    """Characters of a value as text, roughly; containers with all that they hold, as often as they hold it.

    Stops when it is more than `MAX_SIZE`: what holds itself twice, several times over, is beyond counting.
    """
    total, waiting = 0, [value]
    while waiting and total <= MAX_SIZE:
        item = waiting.pop()
        total += ITEM
        if isinstance(item, str):
            total += size_of(item)
        elif isinstance(item, bytes):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
        elif isinstance(item, list | tuple | set | frozenset):
            total += ITEM * len(item)
            waiting.extend(item if total <= MAX_SIZE else ())
        elif isinstance(item, dict):
            total += 2 * ITEM * len(item)
            waiting.extend([*item, *item.values()] if total <= MAX_SIZE else ())
        elif isinstance(item, Namespace):
            waiting.append(object.__getattribute__(item, "_Namespace__attrs"))
    return total
