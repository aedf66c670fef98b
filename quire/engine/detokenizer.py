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
        start, stop = _find_first(text, self._stop)
        if start >= 0:
            self.matched, self._held = stop, ""
            return text[: start + len(stop)] if self._include else text[:start]
        keep = _longest_possible_tail(text, self._stop)
        released, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return released

    def flush(self) -> str:
        """Return the held-back tail, when generation ended for another reason."""
        released, self._held = self._held, ""
        return released


class SpecialStopChecker(StopChecker):
    """Search for stop strings some of which contain special tokens that are left out of the text.

    These are searched for in the text with its special tokens, all others in the visible text.

    Args:
        special: the strings of `stop` that contain special tokens.
    """

    def __init__(self, stop: Sequence[str], special: Sequence[str], *, include_in_output: bool) -> None:
        super().__init__([text for text in stop if text not in special], include_in_output=include_in_output)
        self._special = tuple(special)
        self._is_shown: list[bool] = []  # by character of what is held

    def push(self, text: str, hidden: str = "", *, armed: bool = True) -> str:
        self._held += text + hidden
        self._is_shown += [True] * len(text) + [False] * len(hidden)
        if not armed:
            return self._release(len(self._held))
        shown = self._shown(len(self._held))
        hits = [(start, stop) for start, stop in [_find_first(shown, self._stop)] if start >= 0]
        place, stop = _find_first(self._held, self._special)
        if place >= 0:
            hits.append((len(self._shown(place)), stop))
        if hits:
            start, self.matched = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held, self._is_shown = "", []
            return shown[:start] + (self.matched if self._include else "")
        keep = max(
            _longest_possible_tail(self._held, self._special),
            self._size_of_shown_tail(_longest_possible_tail(shown, self._stop)),
        )
        return self._release(len(self._held) - keep)

    def flush(self) -> str:
        return self._release(len(self._held))

    def _shown(self, size: int) -> str:
        return "".join(
            char for char, is_shown in zip(self._held[:size], self._is_shown, strict=False) if is_shown
        )

    def _release(self, size: int) -> str:
        released = self._shown(size)
        self._held, self._is_shown = self._held[size:], self._is_shown[size:]
        return released

    def _size_of_shown_tail(self, count: int) -> int:
        """Return the length of the shortest tail with `count` shown characters."""
        size = 0
        while count > 0:
            size += 1
            count -= self._is_shown[-size]
        return size


def _find_first(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """Return the first position of a stop string, and the longest one there; -1 without any."""
    hits = [(index, stop) for stop in stops if (index := text.find(stop)) >= 0]
    return min(hits, key=lambda hit: (hit[0], -len(hit[1])), default=(-1, ""))


def _longest_possible_tail(text: str, stops: Sequence[str]) -> int:
    """Return the size of the longest tail of a text that begins a stop string."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    for size in range(longest, 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def make_stop_checker(
    tokenizer: Tokenizer | None, stop: Sequence[str], *, skip_special_tokens: bool, include_in_output: bool
) -> StopChecker:
    """Return a stop string checker for text that may leave special tokens out."""
    if tokenizer is None or not skip_special_tokens or not stop:
        return StopChecker(stop, include_in_output=include_in_output)
    known: dict[str, bool] = tokenizer.cached("special_stops", lambda _: {})
    if len(known) > _MAX_KNOWN_STOPS:
        known.clear()
    special = [text for text in stop if _has_special(tokenizer, text, known)]
    if not special:
        return StopChecker(stop, include_in_output=include_in_output)
    return SpecialStopChecker(stop, special, include_in_output=include_in_output)


_MAX_KNOWN_STOPS = 1024


def _has_special(tokenizer: Tokenizer, text: str, known: dict[str, bool]) -> bool:
    found = known.get(text)
    if found is None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = known[text] = not tokenizer.special_ids.isdisjoint(ids)
    return found
