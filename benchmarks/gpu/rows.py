# SPDX-License-Identifier: Apache-2.0
"""A row of the table of measurements, with its limit and its goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

TITLES = ("what", "limit", "ours", "of the limit", "goal", "verdict")


@dataclass(frozen=True)
class Goal:
    """Goal of a measurement: a bound of our number, or the percentage of the limit to reach."""

    kind: Literal["at most", "at least", "percent"]
    value: float


@dataclass(frozen=True)
class Row:
    """One number. `limit` is the best that the device allows; None where none is known."""

    what: str
    unit: str
    ours: float
    limit: float | None = None
    goal: Goal | None = None

    @classmethod
    def of(cls, fact: Mapping[str, Any]) -> Row:
        """From `asdict` of one."""
        return cls(**{**fact, "goal": fact["goal"] and Goal(**fact["goal"])})

    @property
    def percent(self) -> float | None:
        """Return the percentage of the limit that is reached, by rate or by inverse time; None without a limit."""
        if self.limit is None:
            return None
        is_rate = self.unit.endswith("/s")
        return 100 * (self.ours / self.limit if is_rate else self.limit / self.ours)

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        if self.goal.kind == "at most":
            met = self.ours <= self.goal.value
        else:
            reached = self.ours if self.goal.kind == "at least" else self.percent
            met = reached is not None and reached >= self.goal.value
        return "met" if met else "missed"

    def cells(self) -> list[str]:
        percent = "" if self.percent is None else f"{self.percent:.0f} %"
        limit = "" if self.limit is None else self._number(self.limit)
        return [self.what, limit, self._number(self.ours), percent, self._goal(), self.verdict]

    def line(self) -> str:
        what, limit, ours, percent, goal, verdict = self.cells()
        return f"{what:52} {ours:>18}  limit {limit:>18} {percent:>6}  {goal:24} {verdict}".rstrip()

    def _goal(self) -> str:
        if self.goal is None:
            return ""
        if self.goal.kind == "percent":
            return f"at least {self.goal.value:g} %"
        return f"{self.goal.kind} {self._number(self.goal.value)}"

    def _number(self, value: float) -> str:
        return f"{value:,.0f} {self.unit}" if value >= 1000 else f"{value:.3g} {self.unit}"
