"""`Supervisor`: what to do about a core that died.

Invariant: pure but for the clock it is given; it decides, and whoever asked restarts. Nothing is restarted for ever: a
request is given to a third core only if it was not being worked on when two died, and the 4th death within WINDOW_S is
the engine's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass

WINDOW_S = 600.0
BACKOFF_S = (0.0, 1.0, 5.0)
"""How long to wait before a core is started again, after the first, second and third death within WINDOW_S."""
MAX_DEATHS = len(BACKOFF_S)


@dataclass(frozen=True)
class Verdict:
    """When to start a new core (None: the engine has died with this one), and which requests do not go on in it."""

    restart_in_s: float | None
    failed: frozenset[str] = frozenset()


class Blame:
    """Remembers who was being worked on when cores died; each front end for its own requests.

    Args:
        resume: whether requests in flight go on in the new core.
    """

    def __init__(self, *, resume: bool) -> None:
        self._resume = resume
        self._suspects: dict[int, Set[str]] = {}

    def failed(self, core: int, in_flight: Set[str], in_work: Set[str]) -> frozenset[str]:
        """A core has died that had these requests in flight, and of them these in work: who does not go on."""
        if not self._resume:
            return frozenset(in_flight)
        suspects = self._suspects.get(core, frozenset())
        self._suspects[core] = (suspects | in_work) & in_flight
        return frozenset(suspects & in_work)


class Supervisor:
    """Remembers deaths of an engine's cores.

    Args:
        resume: whether requests in flight go on in the new core.
        clock: monotonic seconds.
    """

    def __init__(self, *, resume: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._blame = Blame(resume=resume)
        self._clock = clock
        self._deaths: deque[float] = deque()

    def died(self, core: int, in_flight: Set[str], in_work: Set[str]) -> Verdict:
        """A core has died that had these requests in flight, and of them these in work."""
        now = self._clock()
        while self._deaths and self._deaths[0] <= now - WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > MAX_DEATHS:
            return Verdict(None)
        return Verdict(BACKOFF_S[len(self._deaths) - 1], self._blame.failed(core, in_flight, in_work))
