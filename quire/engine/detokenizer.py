"""Incremental detokenization and stop strings.

Invariant: the deltas of a request, joined, are the text of all its tokens, cut at a stop string; each push costs
time proportional to the new tokens, and no delta ends in a character that later tokens could still change.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
"""Tokens kept to the left of new ones: more than the at most three tokens of an unfinished UTF-8 character, and
enough for tokenizers whose spacing depends on the token before."""
WINDOW_TOKENS = 24
"""The window is cut back to CONTEXT_TOKENS when it has grown to this size."""


class IncrementalDetokenizer:
    """Text of a growing token sequence.

    A small window of recent tokens is decoded again at each push, and what it adds to the text already given out
    is the delta. Decoders replace an unfinished character by exactly one U+FFFD at the very end (Unicode 15,
    3.9, "maximal subparts"), so holding back a final U+FFFD is both necessary and sufficient.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._num_given_out = len(_settled(self._decode()))

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        self._window.extend(token_ids)
        text = _settled(self._decode())
        delta = text[self._num_given_out :]
        self._num_given_out = max(self._num_given_out, len(text))
        if len(self._window) > WINDOW_TOKENS:
            del self._window[:-CONTEXT_TOKENS]
            self._num_given_out = len(_settled(self._decode()))
        return delta

    def flush(self) -> str:
        """The held-back rest, when no more tokens follow."""
        text = self._decode()
        delta = text[self._num_given_out :]
        self._num_given_out = len(text)
        return delta

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)


def _settled(text: str) -> str:
    return text[:-1] if text.endswith(REPLACEMENT) else text


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
