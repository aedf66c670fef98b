"""What steps of each width cost, learned from those that were run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

WIDEST = 256
"""Steps of more tokens are nobody's who waits for memory."""
HOPE = 0.02
"""A token more is taken to cost so much of a step until it was seen; too little is found out, too much never is."""
FALL, RISE = 0.3, 0.05
"""A step that was held up says little, and one that was fast says that it can be."""


class StepCosts:
    """Seconds of a step in which every request generates, by its width: the tokens that it computes."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._seconds = [0.0] * (WIDEST + 1)
        self._recorded: set[tuple[int, int]] = set()

    def note(self, num_requests: int, width: int, seconds: float) -> None:
        """A step has taken so long. The first one of a kind is not counted: it may have been recorded."""
        if width > WIDEST:
            return
        if (num_requests, width) not in self._recorded:
            self._recorded.add((num_requests, width))
            return
        known = self._seconds[width]
        if known == 0.0:
            insort(self._known, width)
            self._seconds[width] = seconds
        elif seconds < known:
            self._seconds[width] += FALL * (seconds - known)
        else:
            self._seconds[width] += RISE * (min(seconds, 2 * known) - known)

    def knows(self, width: int) -> bool:
        """Whether a step of this width was timed."""
        return width <= WIDEST and self._seconds[width] > 0.0

    def of(self, width: int) -> float:
        """An estimate for one width."""
        return self._seconds[width] or self._between(width)

    def from_width(self, first: int) -> Iterator[float]:
        """Estimates for this width, the next one, and so on up to `WIDEST`, in one unit; they never fall."""
        highest = 0.0
        for width in range(first, WIDEST + 1):
            highest = max(highest, self.of(width))
            yield highest

    def _between(self, width: int) -> float:
        """Of a width that was not seen, from its neighbours that were."""
        place = bisect_left(self._known, width)
        if not self._known:
            return 1.0 + HOPE * width
        if place == 0:
            return self._seconds[self._known[0]]
        low = self._known[place - 1]
        if place == len(self._known):
            return self._seconds[low] * (1.0 + HOPE * (width - low))
        high = self._known[place]
        share = (width - low) / (high - low)
        return self._seconds[low] + share * (self._seconds[high] - self._seconds[low])
