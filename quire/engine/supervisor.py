"""`Supervisor`: what to do about a core that died.

Invariant: pure but for the clock it is given; it decides, and whoever asked restarts. Nothing is restarted for ever: a
request is given to a third core only if it was not being worked on when two died, and the 4th death of one core within
WINDOW_S is the engine's.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
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
        self._suspects: Set[str] = frozenset()

    def failed(self, in_flight: Set[str], in_work: Set[str], elsewhere: Set[str]) -> frozenset[str]:
        """A core has died that had these requests in flight, and of them these in work: who does not go on.

        Others are in flight `elsewhere`, on cores to which they may have gone from one that died.
        """
        if not self._resume:
            return frozenset(in_flight)
        suspects = self._suspects
        self._suspects = (suspects | in_work) & (in_flight | elsewhere)
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
        self._deaths: defaultdict[int, deque[float]] = defaultdict(deque)

    def died(
        self, core: int, in_flight: Set[str], in_work: Set[str], elsewhere: Set[str] = frozenset()
    ) -> Verdict:
        """A core has died that had these requests in flight, and of them these in work; others are `elsewhere`."""
        now, deaths = self._clock(), self._deaths[core]
        while deaths and deaths[0] <= now - WINDOW_S:
            deaths.popleft()
        deaths.append(now)
        if len(deaths) > MAX_DEATHS:
            return Verdict(None)
        return Verdict(BACKOFF_S[len(deaths) - 1], self._blame.failed(in_flight, in_work, elsewhere))

    def left(self, in_flight: Set[str], in_work: Set[str], elsewhere: Set[str] = frozenset()) -> Verdict:
        """The same of a core whose host starts it again: it may come back at any time."""
        return Verdict(0.0, self._blame.failed(in_flight, in_work, elsewhere))
