# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenization and stop strings.

Invariant: the deltas of a request, joined, are the text of all its tokens, cut at a stop string; each push costs
time proportional to the new tokens, and no delta ends in a character that later tokens could still change.
"""

from __future__ import annotations

from collections.abc import Sequence
from encodings import utf_8

from quire.engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of a growing token sequence after its prompt.

    The tokens' bytes go through an incremental UTF-8 decoder, which holds back at most one unfinished character, even
    one begun by the prompt. The text equals `Tokenizer.decode` of the same bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._place = tokenizer.place_after(
            prompt_token_ids, skip_special_tokens=skip_special_tokens, shown=shown
        )
        self._utf8 = utf_8.IncrementalDecoder("replace")
        self._utf8.decode(self._place.unfinished)

    def bytes_of(self, token_id: int) -> bytes:
        """Return what a token would add to the text if it came next, even if it is special."""
        return self._place.bytes_of(token_id)

    def hidden_text(self, token_id: int) -> str:
        """Return the literal of a special token that `push` leaves out of the text; empty for any other."""
        return self._tokenizer.literal(token_id) if self._place.skips(token_id) else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became certain with these tokens."""
        added = b"".join(map(self._place.advance, token_ids))
        if added.isascii() and not self._utf8.buffer:  # as nearly all are; the decoder is written in Python
            return added.decode()
        return self._utf8.decode(added)

    def flush(self) -> str:
        """Return the held-back rest, when no more tokens follow."""
        return self._utf8.decode(b"", True)


class StopChecker:
    """Search for stop strings in text that arrives in pieces.

    `push` returns text that may be given out: everything except the longest tail that could still become a stop
    string. After a match `matched` is the stop string, and no further text is returned.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self._stop = tuple(stop)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, hidden: str = "", *, armed: bool = True) -> str:
        """Add text; with `armed=False` (below `min_tokens`) it passes through without a search.

        Args:
            hidden: special tokens behind it that are no part of the text; only `SpecialStopChecker` reads them.
        """
        if not self._stop or not armed:
            released, self._held = self._held + text, ""
            return released
        text = self._held + text
        start, stop = find_first(text, self._stop)
        if start >= 0:
            self.matched, self._held = stop, ""
            return text[: start + len(stop)] if self._include else text[:start]
        keep = longest_possible_tail(text, self._stop)
        released, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return released

    def flush(self) -> str:
        """Return the held-back tail, when generation ended for another reason."""
        released, self._held = self._held, ""
        return released


def find_first(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """Return the first position of a stop string, and the longest one there; -1 without any."""
    hits = [(index, stop) for stop in stops if (index := text.find(stop)) >= 0]
    return min(hits, key=lambda hit: (hit[0], -len(hit[1])), default=(-1, ""))


def longest_possible_tail(text: str, stops: Sequence[str]) -> int:
    """Return the size of the longest tail of a text that begins a stop string."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    for size in range(longest, 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
