"""What a grammar must know of a model's tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, by id.

    Attributes:
        tokens: bytes that each adds to a text, which need not be whole characters; nothing for ids that are no text.
        special: literals of special tokens -> their ids. They are in no text, but a grammar may ask for them.
        ends: ids that end a text, at least one.
    """

    tokens: list[bytes]
    special: dict[str, int]
    ends: tuple[int, ...]

    @staticmethod
    def of_bytes(special: tuple[str, ...] = ()) -> Vocabulary:
        """A token for each byte, and behind them an end and these special tokens."""
        tokens = [bytes([byte]) for byte in range(256)]
        names = dict.fromkeys(("<end>", *special))
        ids = {name: 256 + place for place, name in enumerate(names)}
        return Vocabulary([*tokens, *(b"" for _ in ids)], ids, (256,))
