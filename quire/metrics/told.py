"""`StatLoggers`: everybody who is told what an engine does.

Invariant: what one of them raises is logged once and harms nobody else. Who joins late is told which cores are ready.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from quire.config import EngineConfig
from quire.metrics.stats import IterationStats, StatLogger
from quire.scheduler.output import SchedulerStats

logger = logging.getLogger(__name__)


class StatLoggers(StatLogger):
    """Tells each of its members, in the order in which they joined."""

    def __init__(self, members: Iterable[StatLogger] = ()) -> None:
        self.members = list(members)
        self._failing: list[StatLogger] = []
        self._ready: dict[int, tuple[EngineConfig, int]] = {}

    def add(self, member: StatLogger) -> None:
        self.members.append(member)
        self._tell(member, self._repeat_ready)

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        self._tell_all(lambda one: one.record(iteration, scheduler, core))

    def core_ready(self, core: int, config: EngineConfig, num_blocks: int) -> None:
        self._ready[core] = config, num_blocks
        self._tell_all(lambda one: one.core_ready(core, config, num_blocks))

    def core_died(self, core: int, num_resumed: int, num_failed: int) -> None:
        self._ready.pop(core, None)
        self._tell_all(lambda one: one.core_died(core, num_resumed, num_failed))

    def rested(self, state: str) -> None:
        self._tell_all(lambda one: one.rested(state))

    def refused(self, limit: str) -> None:
        self._tell_all(lambda one: one.refused(limit))

    def close(self) -> None:
        self._tell_all(lambda one: one.close())

    def _repeat_ready(self, member: StatLogger) -> None:
        for core, (config, num_blocks) in self._ready.items():
            member.core_ready(core, config, num_blocks)

    def _tell_all(self, tell: Callable[[StatLogger], None]) -> None:
        for member in self.members:
            self._tell(member, tell)

    def _tell(self, member: StatLogger, tell: Callable[[StatLogger], None]) -> None:
        try:
            tell(member)
        except Exception:
            if member not in self._failing:  # its every step would fill the log
                self._failing.append(member)
                logger.exception("statistics could not be recorded by %r", member)
