# SPDX-License-Identifier: Apache-2.0
"""Vocabulary of a model in bytes: plain data that an executor hands to its ranks, for grammars there."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_END = 256  # id of the end token in `Vocabulary.from_bytes`


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a model, by id.

    Attributes:
        tokens: bytes that each token adds to a text, perhaps partial characters; empty for ids without text.
        special: literals of special tokens -> ids; they are no text, but a grammar may name them.
        ends: ids that end a text, at least one.
    """

    tokens: list[bytes]
    special: dict[str, int]
    ends: tuple[int, ...]

    @staticmethod
    def from_bytes(special: tuple[str, ...] = ()) -> Vocabulary:
        """Return a vocabulary of all bytes, an end token and these special tokens."""
        tokens = [bytes([byte]) for byte in range(256)]
        names = dict.fromkeys(("<end>", *special))
        ids = {name: BYTES_END + place for place, name in enumerate(names)}
        return Vocabulary([*tokens, *(b"" for _ in ids)], ids, (BYTES_END,))
