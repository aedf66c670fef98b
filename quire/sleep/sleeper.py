# SPDX-License-Identifier: Apache-2.0
"""`Sleeper`: sleep mode of an engine core.

Invariant: before memory is freed, no step is in flight, the worker has no row and no block is held. So the cache wakes
empty, and retained requests are computed again, with the tokens that they would have had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from quire.config import EngineConfig
from quire.engine.core_feature import CoreFeature
from quire.engine.sleep_state import MEMORY_TAGS, WEIGHTS, EngineSleepState
from quire.engine.step_loop import Clock
from quire.executor.base import Executor
from quire.processes import collect_garbage
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Sleeper(CoreFeature):
    """Sleep mode of a scheduler and an executor."""

    vital = frozenset({"sleep", "wake_up"})

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__(config, executor, scheduler, clock)
        self.rest = EngineSleepState()

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {"sleep": self.sleep, "wake_up": self.wake_up}

    def sleep(self, level: int) -> list[str]:
        """Enter a sleep level, or a deeper one; return the tags that sleep."""
        self._core.settle()
        self._begin()
        self._scheduler.pause(self._clock())
        self._drain()
        if level > 0:
            self._scheduler.forget(self._clock())
            self._drain()  # the worker frees the rows
            self._executor.sleep(level)
            collect_garbage()
        self.rest = self.rest.deeper(level)
        logger.info("asleep at level %d: %s", self.rest.level, ", ".join(sorted(self.rest.asleep)))
        return sorted(self.rest.asleep)

    def wake_up(self, tags: Iterable[str]) -> list[str]:
        """Wake these tags; return those that still sleep.

        Raises:
            ConflictError: one of them needs a tag that would still sleep; nothing was done.
            StartupError: the weights cannot be loaded, or have changed, or memory is short; this tag and later ones
                still sleep.
        """
        wanted = list(tags)
        self.rest.without(wanted)
        self._begin()
        for tag in MEMORY_TAGS:
            if tag in wanted and tag in self.rest.asleep:
                self._wake(tag)
                self.rest = self.rest.without([tag])
        self.rest = self.rest.without(wanted)
        if not self.rest:
            self._scheduler.resume(self._clock())
        logger.info("awake but for: %s", ", ".join(sorted(self.rest.asleep)) or "nothing")
        return sorted(self.rest.asleep)

    def _wake(self, tag: str) -> None:
        rereads = tag == WEIGHTS and self.rest.level > 1
        if rereads:
            self._core.check_files()
        self._executor.wake_up(tag)
        if rereads:
            self._core.check_files()  # files may have changed while they were read

    def _begin(self) -> None:
        """Note work that may take as long as loading."""
        if self._core.progress is not None:
            self._core.progress.load()

    def _drain(self) -> None:
        """Process the results of steps in flight, and have the worker free removed requests."""
        while self._scheduler.has_work():
            self._core.run_step()
