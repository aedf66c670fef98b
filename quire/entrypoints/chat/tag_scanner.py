"""Finds a tag in text that arrives in pieces of any size.

Invariant: the pieces and tags given out join to exactly what was fed, and the work is linear in it.
"""

from __future__ import annotations

from collections.abc import Iterator


class TagScanner:
    """Looks for `tag`, which the consumer may change whenever a tag was found."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self._held = ""

    def feed(self, text: str) -> Iterator[str | None]:
        """Text that cannot be part of the tag, and None where the tag stood; must be consumed to the end."""
        text, position = self._held + text, 0
        while (found := text.find(self.tag, position)) >= 0:
            if found > position:
                yield text[position:found]
            position = found + len(self.tag)
            yield None
        self._held = self._beginning_at_end(text, position)
        certain = text[position : len(text) - len(self._held)]
        if certain:
            yield certain

    def flush(self) -> str:
        """The beginning of a tag that never came."""
        held, self._held = self._held, ""
        return held

    def _beginning_at_end(self, text: str, position: int) -> str:
        longest = min(len(self.tag) - 1, len(text) - position)
        sizes = range(longest, 0, -1)
        return next((text[-size:] for size in sizes if self.tag.startswith(text[-size:])), "")
