"""Whether an API process besides the first still goes on.

Invariant: it counts turns of its event loop in its page of the ledger, which waits for nobody, and the first process
looks. What hangs is told from what computes for long as it is of a core (`quire.engine.progress`).
"""

from __future__ import annotations

import asyncio
import time

from quire.engine.ledger import Column, Ledger, Page
from quire.engine.progress import Heartbeat, cpu_seconds

BEAT_S = 0.5
"""How often a process counts, and the first one looks."""
HUNG_S = 10.0
"""So long a process may neither count nor compute before it is killed. Its loop waits for nothing, neither the core nor
the log, so 5 s would do (`STALL_S`); twice that is for a machine that swaps."""


async def beat(page: Page) -> None:
    """Count, for ever."""
    while True:
        page.add(Column.TURNS, 1)
        await asyncio.sleep(BEAT_S)


class Pulse:
    """Of the process of this page, as the first one feels it; from its start on, since loading computes."""

    def __init__(self, ledger: Ledger, page: int, pid: int) -> None:
        self._ledger = ledger
        self._page = page
        self._pid = pid
        self._heartbeat = Heartbeat(HUNG_S)

    @property
    def stalls(self) -> bool:
        """Whether it seems to hang, so that it should be given nothing."""
        return self._heartbeat.stalls

    @property
    def silent_s(self) -> float:
        return self._heartbeat.silent_s

    def hangs(self) -> bool:
        """Look."""
        num_turns = 1 + int(self._ledger.get(self._page, Column.TURNS))
        return self._heartbeat.hangs(time.monotonic(), num_turns, cpu_seconds(self._pid))
