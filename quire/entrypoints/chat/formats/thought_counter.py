"""Counts the tokens of reasoning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

TokenIds = tuple[int, ...]


class ThoughtCounter:
    """Counts the tokens between the markers of an answer's reasoning, as their ids come.

    Where a marker is no token of its own, it is looked for as the tokenizer writes it. A marker of calls may be a
    mention or end the reasoning, as the text behind it tells: what follows one is counted when that is known.

    Args:
        opens, closes: the token ids of each marker.
        calls: of each marker of calls, if calls end the reasoning.
        is_open: the answer begins inside of the reasoning.
    """

    def __init__(
        self,
        opens: Sequence[TokenIds],
        closes: Sequence[TokenIds],
        calls: Sequence[TokenIds] = (),
        *,
        is_open: bool,
    ) -> None:
        self._opens = opens
        self._calls = calls
        self._markers = [marker for marker in (*opens, *closes, *calls) if marker]
        self._last_ids = {marker[-1] for marker in self._markers}
        self._longest = max(map(len, self._markers), default=1)
        self._last: TokenIds = ()
        self._num_read = 0
        self._counted = 0
        """Of all reasoning but what has begun at `_begin`; None: the place is outside of any."""
        self._begin: int | None = 0 if is_open else None
        self._unread: deque[tuple[TokenIds, int]] = deque()
        """Markers with where they begin, of which the first waits to be told."""
        self._num_told = 0

    @property
    def num_tokens(self) -> int:
        """Of the reasoning, as far as it is certain."""
        if self._begin is None:
            return self._counted
        return self._counted + (self._unread[0][1] if self._unread else self._num_read) - self._begin

    def add(self, token_ids: Iterable[int]) -> None:
        """Take in the next tokens."""
        for token_id in token_ids:
            self._num_read += 1
            self._last = (*self._last, token_id)[-self._longest :]
            if token_id in self._last_ids:
                self._find()

    def _find(self) -> None:
        marker = next((one for one in self._markers if self._last[-len(one) :] == one), ())
        if marker:
            self._unread.append((marker, self._num_read - len(marker)))

    def settle(self, call_markers: Sequence[bool]) -> None:
        """Take in what became of the markers of calls in the reasoning (`AnswerReader.call_markers`)."""
        while self._unread:
            marker, place = self._unread[0]
            if marker in self._calls and self._begin is not None:
                if self._num_told == len(call_markers):
                    return
                self._num_told += 1
                if call_markers[self._num_told - 1]:
                    self._close(place)
            elif marker in self._opens:
                self._open(place, len(marker))
            elif self._begin is not None:
                self._close(place)
            self._unread.popleft()

    def _open(self, place: int, num_tokens: int) -> None:
        if self._begin is None:
            self._begin = place + num_tokens
        else:  # it is said once more
            self._counted -= num_tokens

    def _close(self, place: int) -> None:
        assert self._begin is not None
        self._counted += place - self._begin
        self._begin = None
