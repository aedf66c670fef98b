"""Keeps a user's text from turning into special tokens inside a rendered prompt.

A template may write `<|im_end|>` and mean the token; a user who writes it must get eleven characters of text.
After rendering the two look the same, so the difference is marked before: a character that occurs nowhere in
the conversation is put in front of every special-token literal in user text, and in front of a beginning of
one at the end of a string, which the template could complete. After rendering, a literal with the mark before
it is text. The text between two true special tokens that holds a mark is encoded on its own with special
tokens off; a tokenizer cuts at special tokens anyway, so cutting there changes no other id.

Invariant: a prompt without such text is encoded in one call, exactly as rendered.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from quire.errors import ValidationError

SCRIPTS = (range(0xA500, 0xA60C), range(0xA000, 0xA48D), range(0x20000, 0x2A6D0))  # Vai, Yi, rare Han
MARKS = tuple(map(chr, itertools.chain.from_iterable(SCRIPTS)))
"""Candidates for the mark: letters that hardly any text has.

They are printable, because a template may write a list or an object as Python does, which escapes other characters.
"""
STRETCH_CHARS = 2**16


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]: ...


class Literals:
    """The special tokens of a tokenizer as texts, the longest first, and how they begin."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self.texts = sorted(filter(None, special_tokens), key=len, reverse=True)
        self.beginnings = {text[:size] for text in self.texts for size in range(1, len(text))}
        self.longest = max(map(len, self.texts), default=0)

    def within(self, text: str) -> str:
        """An expression for those that occur in a text; empty if none does."""
        return "|".join(re.escape(literal) for literal in self.texts if literal in text)


class PlainText:
    """Marks and unmarks the special-token literals of one conversation; `end` is a free character for the caller.

    Args:
        values: everything user-made that will be rendered; decides which character is free to be the mark.
    """

    def __init__(self, literals: Literals, values: Any) -> None:
        used = set[str]()
        for stretch in _without_ascii(_strings(values)):
            used.update(stretch)
        free = list(itertools.islice((mark for mark in MARKS if mark not in used), 2))
        if len(free) < 2:
            raise ValidationError("messages use every character that could mark plain text", param="messages")
        self._mark, self.end = free
        self._literals = literals

    def protect(self, value: Any) -> Any:
        """`value` with every string in it, keys included, marked."""
        if isinstance(value, str):
            return self._protect_end(self._protect_inside(value))
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def encode(self, tokenizer: Encoder, rendered: str) -> list[int]:
        """Token ids of a rendered prompt in which user text was marked."""
        ids: list[int] = []
        for piece, is_plain in self._pieces(rendered):
            ids += tokenizer.encode(piece, add_special_tokens=False, allow_special=not is_plain)
        return ids

    def unmark(self, text: str) -> str:
        return text.replace(self._mark, "")

    def _protect_inside(self, text: str) -> str:
        present = self._literals.within(text)
        # A lookahead finds overlapping literals too.
        return re.sub(f"(?={present})", self._mark, text) if present else text

    def _protect_end(self, text: str) -> str:
        sizes = range(min(self._literals.longest - 1, len(text)), 0, -1)
        size = next((size for size in sizes if text[-size:] in self._literals.beginnings), 0)
        return f"{text[:-size]}{self._mark}{text[-size:]}" if size else text

    def _pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Maximal stretches of the prompt without marks, and between them the marked stretches, unmarked."""
        if self._mark not in rendered:
            yield rendered, False
            return
        open_text = ""
        for piece in self._split_at_special_tokens(rendered):
            if self._mark not in piece:
                open_text += piece
                continue
            if open_text:
                yield open_text, False
            yield self.unmark(piece), True
            open_text = ""
        if open_text:
            yield open_text, False

    def _split_at_special_tokens(self, rendered: str) -> list[str]:
        present = self._literals.within(rendered)
        return re.split(f"((?<!{self._mark})(?:{present}))", rendered) if present else [rendered]


def _without_ascii(texts: Iterable[str]) -> Iterator[str]:
    """Stretches of the texts that may hold a mark, none so long that other threads would have to wait for it."""
    for text in texts:
        if not text.isascii():
            for start in range(0, len(text), STRETCH_CHARS):
                yield text[start : start + STRETCH_CHARS]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
