"""What steps of each width cost: timed before the first request, and learned from those that were run."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import accumulate

WIDEST = 256
"""Steps of more tokens are nobody's who waits for memory."""
HOPE = 0.02
"""A token more is taken to cost so much of a step until it was seen; too little is found out, too much never is."""
FALL, RISE = 0.3, 0.05
"""A step that was held up says little, and one that was fast says that it can be."""


class StepCosts:
    """Seconds of a step in which every request generates, by its width: the tokens that it computes.

    What was timed before there were requests is a prior, of which only the shape counts once steps of requests were
    seen: a width that was not seen is taken to cost as many times what it was timed to as those around it do.
    """

    def __init__(self) -> None:
        self._known: list[int] = []
        """Widths that were seen, in order."""
        self._seconds = [0.0] * (WIDEST + 1)
        self._recorded: set[tuple[int, int]] = set()
        self._timed: list[int] = []
        """Widths that were timed before, in order."""
        self._expected = [1.0] * (WIDEST + 1)
        """By them, of each width; all alike where nothing was timed."""

    def expect(self, seconds: dict[int, float]) -> None:
        """By width, what steps have taken when nobody waited for them."""
        self._timed = sorted(width for width in seconds if width <= WIDEST)
        if self._timed:
            self._expected = [_between(self._timed, seconds, width) for width in range(WIDEST + 1)]

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
        """Whether a step of this width was seen, or timed before."""
        return width <= WIDEST and (self._seconds[width] > 0.0 or width in self._timed)

    def of(self, width: int) -> float:
        """An estimate for one width."""
        if width > WIDEST:
            return self.of(WIDEST) * (1.0 + HOPE * (width - WIDEST))
        return self._seconds[width] or self._estimates(width, width)[0]

    def rising(self, first: int, count: int) -> list[float]:
        """Estimates for this width and those behind it, `count` in all or up to `WIDEST`; they never fall."""
        return list(accumulate(self._estimates(first, min(first + count - 1, WIDEST)), max))

    def _estimates(self, first: int, last: int) -> list[float]:
        """Of the widths `first` to `last`: as they were seen, or as those around them were."""
        found, known = list[float](), self._known
        place = bisect_left(known, first)
        while (width := first + len(found)) <= last:
            end = known[place] if place < len(known) else WIDEST + 1
            if width < end:
                found += self._unseen(width, min(end - 1, last), known[max(place - 1, 0) : place + 1])
            if end <= last:
                found.append(self._seconds[end])
            place += 1
        return found

    def _unseen(self, first: int, last: int, around: list[int]) -> list[float]:
        """Of widths that were not seen; `around` them, one on each side if there are so many, are those that were."""
        expected, widths = self._expected, range(first, last + 1)
        if not around:
            return [expected[width] * self._hope(width, 0) for width in widths]
        low, high = around[0], around[-1]
        ratio = self._seconds[low] / expected[low]
        if high < first:
            return [ratio * expected[width] * self._hope(width, high) for width in widths]
        if last < low:
            return [ratio * expected[width] for width in widths]
        slope = (self._seconds[high] / expected[high] - ratio) / (high - low)
        return [(ratio + slope * (width - low)) * expected[width] for width in widths]

    def _hope(self, width: int, last: int) -> float:
        """What a width is taken to cost more than the last that was seen, where nothing was timed."""
        return 1.0 if self._timed else 1.0 + HOPE * (width - last)


def _between(widths: list[int], seconds: dict[int, float], width: int) -> float:
    """What was timed of one width, or of those around it."""
    place = bisect_left(widths, width)
    if place == len(widths):
        return seconds[widths[-1]] * (1.0 + HOPE * (width - widths[-1]))
    high, low = widths[place], widths[max(place - 1, 0)]
    if place == 0 or width == high:
        return seconds[high]
    share = (width - low) / (high - low)
    return (1.0 - share) * seconds[low] + share * seconds[high]
