"""Runs checks one after the other, prints a line for each, and goes on after a failure."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True)
class Check:
    """One thing that must hold: `run` returns an error, which may be at most `limit`."""

    name: str
    run: Callable[[], float]
    limit: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a check; `trouble` is a traceback, or why it was not run."""

    check: Check
    error: float | None
    seconds: float
    trouble: str = ""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.check.limit

    @property
    def verdict(self) -> str:
        if self.passed:
            return "pass"
        return "FAIL" if self.error is not None or self.seconds else "not run"

    def cells(self) -> list[str]:
        """Verdict, name, error, limit, seconds."""
        error = "-" if self.error is None else f"{self.error:.2e}"
        return [self.verdict, self.check.name, error, f"{self.check.limit:.1e}", f"{self.seconds:.1f}"]

    def line(self) -> str:
        verdict, name, error, limit, seconds = self.cells()
        last = self.trouble.strip().splitlines()[-1:] or [""]
        return f"{verdict:7} {name:64} {error:>9} <= {limit:>7} {seconds:>6} s  {last[0]}".rstrip()


def run_checks(checks: Iterable[Check], limit_s: float, clock: Clock = time.monotonic) -> list[Outcome]:
    """All outcomes, printed as they come; what has not begun after `limit_s` seconds is not run, and so not passed."""
    started, outcomes = clock(), []
    for check in checks:
        left = clock() - started < limit_s
        outcome = _run(check, clock) if left else Outcome(check, None, 0.0, f"no time left of {limit_s:g} s")
        print(outcome.line(), flush=True)
        outcomes.append(outcome)
    return outcomes


def _run(check: Check, clock: Clock) -> Outcome:
    started = clock()
    try:
        error, trouble = check.run(), ""
    except Exception:  # whatever it is, it is this check's failure, and the next ones are to run
        error, trouble = None, traceback.format_exc()
    return Outcome(check, error, max(clock() - started, 1e-9), trouble)
