"""Finds markers in text that arrives in pieces of any size."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache


class Markers:
    """Some strings to look for. Where one begins another, the longer one counts, so a decision may have to wait.

    Invariant: the cost of a piece of text is linear in its length, whatever came before it.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = tuple(dict.fromkeys(marker for marker in markers if marker))
        longest_first = sorted(self.markers, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        firsts = "".join(sorted({marker[0] for marker in self.markers}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        self._longest = max(map(len, self.markers), default=0)

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(*markers: str) -> Markers:
        """The same object for the same markers, which are compiled once: every call of an answer looks for some."""
        return Markers(markers)

    def find(self, text: str) -> re.Match[str] | None:
        """The first marker that stands in the text, unless more text could make a longer one of it."""
        found = self._whole.search(text)
        return found if found is None or not self.may_begin(text[found.start() :]) else None

    def count(self, text: str) -> int:
        """How many markers stand in the whole text."""
        return len(self._whole.findall(text))

    def scan(self, text: str) -> tuple[re.Match[str] | None, int]:
        """The first marker; if there is none, how much of the text's end may be the beginning of one."""
        if self._first.search(text) is None:
            return None, 0
        found = self.find(text)
        return found, 0 if found else self.num_open(text)

    def at(self, text: str) -> str | None:
        """The marker that the text begins with, unless more text could make a longer one of it."""
        found = self._whole.match(text)
        return found.group() if found and not self.may_begin(text) else None

    def may_begin(self, text: str) -> bool:
        """Whether the whole text is the beginning of a marker, and less than all of it."""
        size = len(text)
        return size < self._longest and any(
            size < len(marker) and marker.startswith(text) for marker in self.markers
        )

    def num_open(self, text: str) -> int:
        """How many characters at the end of the text are the beginning of a marker; the most there may be."""
        found = self._first.search(text, max(0, len(text) - self._longest + 1))
        while found is not None:
            if self.may_begin(text[found.start() :]):
                return len(text) - found.start()
            found = self._first.search(text, found.start() + 1)
        return 0
