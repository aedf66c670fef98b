# SPDX-License-Identifier: Apache-2.0
"""Cost model of steps by width, clocks, and the number of draft tokens to verify.

Invariant: decisions follow from numbers that all ranks of a model share, so all ranks draft alike: they call the same
drafters for as many tokens, and exchange data as often.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol


class StepClocks(Protocol):
    """Measures durations."""

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        """Map durations measured by this rank to those that count; all ranks of a model call this equally often."""


class OwnClock:
    """Clocks of a process that decides for itself."""

    def now(self) -> float:
        return time.perf_counter()

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        return list(seconds)


WIDEST = 256  # widest step modeled; wider ones are not memory-bound
HOPE = (
    0.02  # assumed cost of an unseen further token, as part of a step; low: only underestimates get corrected
)
FALL, RISE = 0.3, 0.05  # update rates for a faster and a slower step; a delay says little about the cost


class StepCosts:
    """Seconds of a pure decode step by width, the number of tokens it computes.

    Durations from before the first request are a prior of which only the shape counts once real steps were seen: an
    unseen width costs its prior times the ratio of the widths around it.
    """

    def __init__(self) -> None:
        self._known: list[int] = []
        """Widths seen, in order."""
        self._seconds = [0.0] * (WIDEST + 1)
        self._recorded: set[tuple[int, int]] = set()
        self._timed: list[int] = []
        """Widths timed before the first request, in order."""
        self._expected = [1.0] * (WIDEST + 1)
        """Prior of each width; constant if nothing was timed."""

    def expect(self, seconds: dict[int, float]) -> None:
        """Set the prior: seconds by width, timed before the first request."""
        self._timed = sorted(width for width in seconds if width <= WIDEST)
        if self._timed:
            self._expected = [_between(self._timed, seconds, width) for width in range(WIDEST + 1)]

    def note(self, num_requests: int, width: int, seconds: float) -> None:
        """Record a step. The first one of a kind is skipped: it may have been recorded or captured."""
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

    def is_known(self, width: int) -> bool:
        """Return whether a step of this width was seen or timed before."""
        return width <= WIDEST and (self._seconds[width] > 0.0 or width in self._timed)

    def of(self, width: int) -> float:
        """Return the estimate for one width."""
        if width > WIDEST:
            return self.of(WIDEST) * (1.0 + HOPE * (width - WIDEST))
        return self._seconds[width] or self._estimates(width, width)[0]

    def rising(self, first: int, count: int) -> list[float]:
        """Return non-decreasing estimates for `count` widths from `first` on, or up to `WIDEST`."""
        return list(accumulate(self._estimates(first, min(first + count - 1, WIDEST)), max))

    def _estimates(self, first: int, last: int) -> list[float]:
        """Return estimates for widths `first` to `last`."""
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
        """Return estimates for unseen widths; `around` are the nearest seen widths, at most one on each side."""
        expected, widths = self._expected, range(first, last + 1)
        if not around:
            return [expected[width] * self._unseen_factor(width, 0) for width in widths]
        low, high = around[0], around[-1]
        ratio = self._seconds[low] / expected[low]
        if high < first:
            return [ratio * expected[width] * self._unseen_factor(width, high) for width in widths]
        if last < low:
            return [ratio * expected[width] for width in widths]
        slope = (self._seconds[high] / expected[high] - ratio) / (high - low)
        return [(ratio + slope * (width - low)) * expected[width] for width in widths]

    def _unseen_factor(self, width: int, last: int) -> float:
        """Return the assumed cost of a width relative to the last seen one, if nothing was timed."""
        return 1.0 if self._timed else 1.0 + HOPE * (width - last)


def _between(widths: list[int], seconds: dict[int, float], width: int) -> float:
    """Return the prior of a width, interpolated between timed widths."""
    place = bisect_left(widths, width)
    if place == len(widths):
        return seconds[widths[-1]] * (1.0 + HOPE * (width - widths[-1]))
    high, low = widths[place], widths[max(place - 1, 0)]
    if place == 0 or width == high:
        return seconds[high]
    share = (width - low) / (high - low)
    return (1.0 - share) * seconds[low] + share * seconds[high]


def choose_depth(
    rates: Sequence[float],
    most: int,
    num_requests: int,
    costs: StepCosts,
    seconds_each: float,
    num_ahead: int = 0,
) -> int:
    """Return how many tokens a drafter that takes time should draft for each request; 0 if it does not pay.

    Args:
        rates: [D] probability that a request's draft token is accepted if those before it are.
        most: most tokens to draft.
        num_requests: requests of the step; the result is 0 until such steps were timed.
        costs: cost model of steps.
        seconds_each: seconds to draft one more token for all of them.
        num_ahead: tokens that in-flight steps sample anyway.
    """
    if not costs.is_known(num_requests):
        return 0
    best, depth, tokens = num_requests / costs.of(num_requests), 0, float(num_requests)
    for place in range(num_ahead + 1, most + 1):
        tokens += sum([rate**place for rate in rates])
        width = num_requests + len(rates) * (place - num_ahead)
        rate = tokens / (costs.of(width) + place * seconds_each)
        if rate > best:
            best, depth = rate, place
    return depth


def choose_lengths(
    rates: Sequence[float], lengths: Sequence[int], num_requests: int, costs: StepCosts, num_ahead: int = 0
) -> list[int]:
    """Return how many tokens of each draft to verify, maximizing tokens per second of the step.

    The gain of a token is the probability that it and all before it are accepted; tokens are taken in this order while
    it pays.

    Args:
        rates: [D] probability that a token of a draft is accepted if those before it are.
        lengths: [D] available draft tokens.
        num_requests: requests of the step, one token each; all lengths are 0 until such steps were timed.
        costs: cost model of steps.
        num_ahead: tokens of each draft that in-flight steps sample anyway: they must be right, and cost nothing.
    """
    if not costs.is_known(num_requests):  # not measured yet
        return [0] * len(rates)
    gains: list[tuple[float, int]] = []
    for draft, rate in enumerate(rates):
        gain = -(rate**num_ahead)
        for _ in range(num_ahead, lengths[draft]):
            gain *= rate
            gains.append((gain, draft))
    if len(rates) > 1:
        gains.sort()
    gains.append((0.0, 0))  # sentinel after the last
    chosen, count, best, tokens = [0] * len(rates), 0, 0.0, float(num_requests)
    for number, (seconds, (gain, _)) in enumerate(
        zip(costs.rising(num_requests, len(gains)), gains, strict=False)
    ):
        if tokens > best * seconds:
            best, count = tokens / seconds, number
        tokens -= gain
    for _, draft in gains[:count]:
        chosen[draft] += 1
    return [count and count + num_ahead for count in chosen]
