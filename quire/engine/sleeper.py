"""`Sleeper`: how an engine core falls asleep and wakes.

Invariant: before memory goes, no step is in flight, no row is left in the worker and no block is held; so what wakes is
an empty cache, and requests that were kept are computed again, with the tokens that they would have had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from quire.engine.progress import Progress
from quire.engine.sleep import MEMORY_TAGS, WEIGHTS, Rest
from quire.engine.step_loop import Clock, StepLoop
from quire.executor.base import Executor
from quire.processes import collect_garbage
from quire.scheduler.output import RequestUpdate
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Sleeper:
    """Puts scheduler and executor to sleep, and wakes them.

    Args:
        tell: takes the news of requests whose steps were in flight.
        progress: told that the core does what may take long, as while it loads.
        check_files: raises StartupError if the model's files are no longer those of the start.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        loop: StepLoop,
        clock: Clock,
        tell: Callable[[list[RequestUpdate]], None],
        progress: Progress | None,
        check_files: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._loop = loop
        self._clock = clock
        self._tell = tell
        self._progress = progress
        self._check_files = check_files
        self.rest = Rest()

    def sleep(self, level: int) -> list[str]:
        """Fall asleep, or deeper asleep; returns what sleeps."""
        self._begin()
        self._scheduler.pause(self._clock())
        self._drain()
        if level > 0:
            self._scheduler.forget(self._clock())
            self._drain()  # the worker lets go of the rows
            self._executor.sleep(level)
            collect_garbage()
        self.rest = self.rest.deeper(level)
        logger.info("asleep at level %d: %s", self.rest.level, ", ".join(sorted(self.rest.asleep)))
        return sorted(self.rest.asleep)

    def wake_up(self, tags: Iterable[str]) -> list[str]:
        """Wake these; returns what still sleeps.

        Raises:
            ConflictError: one of them needs what would still sleep; nothing was done.
            StartupError: the weights cannot be loaded, or have changed, or memory is short; this and what comes
                behind sleeps on.
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
            self._check_files()
        self._executor.wake_up(tag)
        if rereads:
            self._check_files()  # they may have changed while they were read

    def _begin(self) -> None:
        if self._progress is not None:
            self._progress.load()

    def _drain(self) -> None:
        """Take in the results of steps in flight, and let the worker free what it must."""
        while self._scheduler.has_work():
            self._tell(self._loop.step())
