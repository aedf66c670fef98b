# SPDX-License-Identifier: Apache-2.0
"""Stop strings, some of which hold special tokens that are left out of the text."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.detokenizer import StopChecker, find_first, longest_possible_tail
from quire.engine.tokenizer import Tokenizer

_MAX_KNOWN_STOPS = 1024


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
        hits = [(start, stop) for start, stop in [find_first(shown, self._stop)] if start >= 0]
        place, stop = find_first(self._held, self._special)
        if place >= 0:
            hits.append((len(self._shown(place)), stop))
        if hits:
            start, self.matched = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held, self._is_shown = "", []
            return shown[:start] + (self.matched if self._include else "")
        keep = max(
            longest_possible_tail(self._held, self._special),
            self._size_of_shown_tail(longest_possible_tail(shown, self._stop)),
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


def _has_special(tokenizer: Tokenizer, text: str, known: dict[str, bool]) -> bool:
    found = known.get(text)
    if found is None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = known[text] = not tokenizer.special_ids.isdisjoint(ids)
    return found


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
