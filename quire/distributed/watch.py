"""Somebody who looks at other ranks while this one waits for its device, which shows nothing of them.

Invariant: a loss is noted before anything is broken off for it, so whoever was waiting finds it when it goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from quire.processes import STOPPED

logger = logging.getLogger(__name__)

LOOK_S = 0.5
LOOKS_AT_STOPPED = 10
"""In turn, before a process that is stopped is given up."""


class Watch:
    """On a thread of its own, until one is lost or it is closed.

    Args:
        silent: the ranks that can do nothing now, and why, as `why_silent` says it.
        break_off: what this rank waits for will not come; called once, when one is lost.

    Attributes:
        lost: the rank that was lost, and how; None as long as all are there.
    """

    def __init__(
        self, silent: Callable[[], Mapping[int, str]], break_off: Callable[[], None], look_s: float = LOOK_S
    ) -> None:
        self._silent, self._break_off, self._look_s = silent, break_off, look_s
        self.lost: tuple[int, str] | None = None
        self._stopped: dict[int, int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-rank-losses", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more; what is being broken off is waited for."""
        self._closed.set()
        self._thread.join()

    def look(self) -> tuple[int, str] | None:
        """One look at all: the rank that is lost by now."""
        found = self._silent()
        self._stopped = {
            rank: self._stopped.get(rank, 0) + 1 for rank, how in found.items() if how == STOPPED
        }
        for rank, how in found.items():
            if how != STOPPED or self._stopped[rank] >= LOOKS_AT_STOPPED:
                return rank, how
        return None

    def _run(self) -> None:
        while not self._closed.wait(self._look_s):
            self.lost = self.look()
            if self.lost is not None:
                logger.info("rank %d: its process %s", *self.lost)
                self._break_off()
                return
