# SPDX-License-Identifier: Apache-2.0
"""Runs checks one after the other, prints a line for each, and goes on after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.gpu.journal import Clock, Entry, Fact, Journal


@dataclass(frozen=True)
class Check:
    """One thing that must hold: `run` returns an error, which may be at most `limit`."""

    name: str
    run: Callable[[], float]
    limit: float = 0.0

    def facts(self) -> Iterator[Fact]:
        """As the journal keeps them."""
        yield {"error": self.run(), "limit": self.limit}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a check; `trouble` is a traceback, or the reason that it was not run."""

    name: str
    error: float | None
    limit: float
    seconds: float
    trouble: str = ""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.limit

    @property
    def verdict(self) -> str:
        if self.passed:
            return "pass"
        return "FAIL" if self.error is not None or self.seconds else "not run"

    def cells(self) -> list[str]:
        """Verdict, name, error, limit, seconds."""
        numbers = ["-", "-"] if self.error is None else [f"{self.error:.2e}", f"{self.limit:.1e}"]
        return [self.verdict, self.name, *numbers, f"{self.seconds:.1f}"]

    def line(self) -> str:
        verdict, name, error, limit, seconds = self.cells()
        last = self.trouble.strip().splitlines()[-1:] or [""]
        return f"{verdict:7} {name:64} {error:>9} <= {limit:>7} {seconds:>6} s  {last[0]}".rstrip()


def outcome_of(name: str, entry: Entry) -> Outcome:
    """Return the outcome of a check from its journal entry."""
    error, limit = (entry.facts[0]["error"], entry.facts[0]["limit"]) if entry.facts else (None, 0.0)
    return Outcome(name, error, limit, entry.seconds, entry.trouble or "")


def run_checks(
    checks: Iterable[Check],
    limit_s: float,
    journal: Journal,
    *,
    answers: Callable[[], bool] = lambda: True,
    clock: Clock = time.monotonic,
) -> bool:
    """Run those that the journal does not know, printed as they come; whether the device `answers` to the end.

    What has not begun after `limit_s` seconds is not run, and so not passed.
    """
    started = clock()
    for check in checks:
        if check.name in journal.entries:
            continue
        if clock() - started < limit_s:
            journal.attempt(check.name, check.facts, clock)
        else:
            journal.refuse(check.name, f"no time left of {limit_s:g} s")
        outcome = outcome_of(check.name, journal.entries[check.name])
        print(outcome.line(), flush=True)
        if outcome.trouble and not answers():
            return False
    return True
