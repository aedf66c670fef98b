"""How long a step should take, by what earlier ones took.

Invariant: an estimate errs upward. Whatever a step costs for itself, for each token, and for each that a token looks
at, one of so many times the tokens and looks costs at most so many times as much. Steps are kept by classes of both,
each twice as wide as the one below.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.scheduler.output import SchedulerOutput

FORGET = 0.95
"""What is left of a class's longest time at each step of it that was shorter: a machine that was held up is no rule."""


class Work(NamedTuple):
    """What a step computes."""

    tokens: int
    looks: int
    """All tokens at which they look, themselves among these."""


def work_of(plan: SchedulerOutput) -> Work:
    """All requests' together. Further rounds are not counted: they end before anybody grows impatient."""
    tokens = looks = 0
    for one in plan.scheduled:
        tokens += one.num_tokens
        looks += one.num_tokens * (one.start + one.num_tokens)
    return Work(tokens, looks)


class ExpectedCosts:
    """Learns from every step."""

    def __init__(self) -> None:
        self._longest: dict[Work, float] = {}
        """Seconds, by class."""

    def note(self, work: Work, seconds: float) -> None:
        """A step of so much work took so long."""
        kind = _class_of(work)
        self._longest[kind] = max(seconds, FORGET * self._longest.get(kind, 0.0))

    def of(self, work: Work) -> float | None:
        """Seconds; None: nothing is known."""
        kind = _class_of(work)
        known = self._longest.get(kind)
        if known is not None:
            return known
        return min([seconds * _times(kind, other) for other, seconds in self._longest.items()], default=None)


def _class_of(work: Work) -> Work:
    """The binary digits of each."""
    return Work(work.tokens.bit_length(), work.looks.bit_length())


def _times(kind: Work, other: Work) -> int:
    """How often a step of another class has all that one of a class may have."""
    doublings = max(kind.tokens - other.tokens, kind.looks - other.looks)
    return 1 << max(doublings + 1, 0)
