"""Counts the tokens of reasoning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

TokenIds = tuple[int, ...]


class ThoughtCounter:
    """Counts the tokens between the markers of an answer's reasoning, as their ids come.

    Where a marker is no token of its own, it is looked for as the tokenizer writes it.

    Args:
        opens, closes: the token ids of each marker.
        is_open: the answer begins inside of the reasoning.
    """

    def __init__(self, opens: Sequence[TokenIds], closes: Sequence[TokenIds], *, is_open: bool) -> None:
        self._opens = opens
        self._closes = closes
        self._is_open = is_open
        self._longest = max(map(len, (*opens, *closes)), default=1)
        self._last: TokenIds = ()
        self.num_tokens = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Take in the next tokens."""
        for token_id in token_ids:
            self._last = (*self._last, token_id)[-self._longest :]
            self._step()

    def _step(self) -> None:
        marker = self._marker(self._opens)
        if self._is_open:
            marker = marker or self._marker(self._closes)
            self.num_tokens += 1 - len(marker)
            self._is_open = marker not in self._closes
        elif marker:
            self._is_open = True

    def _marker(self, markers: Sequence[TokenIds]) -> TokenIds:
        return next((marker for marker in markers if self._last[-len(marker) :] == marker), ())
