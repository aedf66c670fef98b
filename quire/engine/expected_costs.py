"""How long a step should take, by what earlier ones took.

Invariant: an estimate errs upward. Steps are kept by classes of work, each twice as wide as the one below; of one that
was not met, the next below says how long it takes if it costs in proportion, and the next above that it takes no
longer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from quire.scheduler.output import SchedulerOutput

FAR = 1024
"""A token that looks at so many before it is taken for twice as much work: sooner than in most models."""
FORGET = 0.95
"""What is left of a class's longest time at each step of it that was shorter: a machine that was held up is no rule."""


def work_of(plan: SchedulerOutput) -> float:
    """Tokens to compute, each by how many it looks at."""
    return sum(
        [one.num_tokens * (1.0 + (one.start + one.num_tokens) / FAR) for one in plan.scheduled], start=0.0
    )


class ExpectedCosts:
    """Learns from every step."""

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}
        self._known: list[int] = []

    def note(self, work: float, seconds: float) -> None:
        """A step of so much work took so long."""
        kind = _class_of(work)
        if kind not in self._longest:
            insort(self._known, kind)
        self._longest[kind] = max(seconds, FORGET * self._longest.get(kind, 0.0))

    def of(self, work: float) -> float | None:
        """Seconds; None: nothing is known."""
        kind = _class_of(work)
        place = bisect_left(self._known, kind)
        above = [self._longest[self._known[place]]] if place < len(self._known) else []
        if above and self._known[place] == kind:
            return above[0]
        below = [self._longest[one] * 2 ** (kind - one + 1) for one in self._known[max(0, place - 1) : place]]
        return min([*above, *below], default=None)


def _class_of(work: float) -> int:
    return math.frexp(max(work, 1.0))[1]
