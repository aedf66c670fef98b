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

    The bytes of the tokens go through an incremental UTF-8 decoder, which holds back at most an unfinished character,
    be it begun by the prompt; the text is what `Tokenizer.decode` makes of the same bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown: Sequence[int] = (),
    ) -> None:
        self._place = tokenizer.place_after(
            prompt_token_ids, skip_special_tokens=skip_special_tokens, shown=shown
        )
        self._utf8 = utf_8.IncrementalDecoder("replace")
        self._utf8.decode(self._place.unfinished)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token would add to the text if it came next, special ones counted in."""
        return self._place.bytes_of(token_id)

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        added = b"".join(map(self._place.advance, token_ids))
        if added.isascii() and not self._utf8.buffer:  # as nearly all are; the decoder is written in Python
            return added.decode()
        return self._utf8.decode(added)

    def flush(self) -> str:
        """The held-back rest, when no more tokens follow."""
        return self._utf8.decode(b"", True)


class StopChecker:
    """Finds stop strings in text that arrives in pieces.

    `push` returns text that may be given out: everything except the longest tail that could still become a stop
    string. After a match `matched` is the stop string, and no further text is returned.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self._stop = tuple(stop)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Add text; with `armed=False` (below `min_tokens`) it passes through without a search."""
        if not self._stop or not armed:
            released, self._held = self._held + text, ""
            return released
        text = self._held + text
        found = self._find_first(text)
        if found is not None:
            start, stop = found
            self.matched, self._held = stop, ""
            return text[: start + len(stop)] if self._include else text[:start]
        keep = self._longest_possible_tail(text)
        released, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return released

    def flush(self) -> str:
        """The held-back tail, when generation ended for another reason."""
        released, self._held = self._held, ""
        return released

    def _find_first(self, text: str) -> tuple[int, str] | None:
        hits = [(index, stop) for stop in self._stop if (index := text.find(stop)) >= 0]
        return min(hits, key=lambda hit: (hit[0], -len(hit[1])), default=None)

    def _longest_possible_tail(self, text: str) -> int:
        longest = min(max(map(len, self._stop)) - 1, len(text))
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
