"""Which special tokens a tokenizer puts around a text, and around and between two that are read as one.

Invariant: the tokens of a text without special ones, in the template, are those that the tokenizer gives it with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

PROBE = "a"


@dataclass(frozen=True)
class Encoded:
    """Tokens of a text or of two; from `second_text_start` on they are those of the second (token type 1)."""

    token_ids: list[int]
    second_text_start: int | None = None


@dataclass(frozen=True)
class Template:
    """Special tokens before, between and behind texts.

    Token type 1 begins `second_offset` tokens behind the first text, if the tokenizer has that type at all.
    """

    prefix: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    second_offset: int | None = None

    @property
    def size(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    def bare(self) -> Template:
        """For texts that bring their own special tokens."""
        return Template(second_offset=None if self.second_offset is None else 0)

    def around(self, first: Sequence[int], second: Sequence[int] = ()) -> Encoded:
        """The texts as the model reads them."""
        ids = [*self.prefix, *first, *self.middle, *second, *self.suffix]
        offset = self.second_offset
        return Encoded(ids, None if offset is None else len(self.prefix) + len(first) + offset)


def read_template(backend: tokenizers.Tokenizer, num_texts: int) -> Template:
    """What this tokenizer does with one text, or with two."""
    # Tokenizers say it nowhere but in what they make.
    encoding = backend.encode(PROBE, PROBE if num_texts == 2 else None)
    ids, owners, types = tuple(encoding.ids), encoding.sequence_ids, encoding.type_ids
    if not {*range(num_texts)} <= {*owners}:  # it has no token for the probe
        return Template()
    first_end, last_start = _last(owners, 0) + 1, owners.index(num_texts - 1)
    around = Template(ids[: owners.index(0)], (), ids[_last(owners, num_texts - 1) + 1 :])
    if num_texts == 1:
        return around
    offset = types.index(1) - first_end if 1 in types else None
    return Template(around.prefix, ids[first_end:last_start], around.suffix, offset)


def _last(owners: list[int | None], owner: int) -> int:
    return len(owners) - 1 - owners[::-1].index(owner)
