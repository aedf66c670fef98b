# SPDX-License-Identifier: Apache-2.0
"""`Sleeper`: sleep mode of an engine core.

Invariant: before memory is freed, no step is in flight, the worker has no row and no block is held. So the cache wakes
empty, and retained requests are computed again, with the tokens that they would have had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from quire.engine.step_loop import Clock, StepLoop
from quire.errors import ConflictError
from quire.executor.base import Executor
from quire.processes import collect_garbage
from quire.scheduler.output import RequestUpdate
from quire.scheduler.scheduler import Scheduler
from quire.sleep.modes import MEMORY_TAGS, WEIGHTS, EngineSleepState
from quire.supervision.progress import Progress

logger = logging.getLogger(__name__)


class Sleeper:
    """Sleep mode of a scheduler and an executor.

    Args:
        tell: receives the updates of requests whose steps were in flight.
        progress: notified of work that may take as long as loading.
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
        self.rest = EngineSleepState()

    def sleep(self, level: int) -> list[str]:
        """Enter a sleep level, or a deeper one; return the tags that sleep."""
        self.begin()
        self._scheduler.pause(self._clock())
        self._drain()
        if level > 0:
            self.forget()  # the worker frees the rows
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
        self.begin()
        for tag in MEMORY_TAGS:
            if tag in wanted and tag in self.rest.asleep:
                self._wake(tag)
                self.rest = self.rest.without([tag])
        self.rest = self.rest.without(wanted)
        if not self.rest:
            self._scheduler.resume(self._clock())
        logger.info("awake but for: %s", ", ".join(sorted(self.rest.asleep)) or "nothing")
        return sorted(self.rest.asleep)

    def check_paused(self) -> None:
        """Raise ConflictError unless no step is planned and the weights are in memory."""
        if not self.rest:
            raise ConflictError("the engine is not paused")
        if WEIGHTS in self.rest.asleep:
            raise ConflictError("the weights are asleep: wake them first (tags=weights)")

    def begin(self) -> None:
        """Mark the beginning of work that may take as long as loading."""
        if self._progress is not None:
            self._progress.load()

    def forget(self) -> None:
        """Discard all cached content; retained requests are computed again. The scheduler is paused."""
        self._scheduler.forget(self._clock())
        self._drain()

    def replace_weights(self, check_files: Callable[[], None]) -> None:
        """Use the weights that the executor has prepared; the scheduler is paused.

        Args:
            check_files: of the new weights, see the class.
        """
        self.begin()
        self._drain()
        self.forget()
        self._executor.commit_weights()
        self._check_files = check_files

    def _wake(self, tag: str) -> None:
        rereads = tag == WEIGHTS and self.rest.level > 1
        if rereads:
            self._check_files()
        self._executor.wake_up(tag)
        if rereads:
            self._check_files()  # files may have changed while they were read

    def _drain(self) -> None:
        """Process the results of steps in flight, and have the worker free removed requests."""
        while self._scheduler.has_work():
            self._tell(self._loop.step())
