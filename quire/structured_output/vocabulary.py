"""What a grammar must know of a model's tokens."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_END = 256
"""Id of the end in `Vocabulary.of_bytes`."""


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
        ids = {name: BYTES_END + place for place, name in enumerate(names)}
        return Vocabulary([*tokens, *(b"" for _ in ids)], ids, (BYTES_END,))


class LongestTokens:
    """Spells texts in tokens.

    Args:
        tokens: bytes of each, by id.
    """

    def __init__(self, tokens: list[bytes]) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(tokens) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that spell a text, each as long as can be, up to where none goes on."""
        ids: list[int] = []
        place = 0
        while place < len(text):
            sizes = range(min(self._longest, len(text) - place), 0, -1)
            size = next((size for size in sizes if text[place : place + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[place : place + size]])
            place += size
        return ids
