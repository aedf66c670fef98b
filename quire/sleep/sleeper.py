# SPDX-License-Identifier: Apache-2.0
"""`Sleeper`: sleep mode of an engine core.

Invariant: before memory is freed, no step is in flight, the worker has no row and no block is held. So the cache wakes
empty, and waiting requests are computed again, with the tokens that they would have had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from quire.config import EngineConfig
from quire.engine.core_feature import CoreFeature
from quire.engine.sleep_state import MEMORY_TAGS, WEIGHTS, EngineSleepState
from quire.engine.step_loop import Clock
from quire.errors import ConflictError, StartupError, ValidationError
from quire.executor.base import Executor
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Sleeper(CoreFeature):
    """Sleep mode of a scheduler and an executor."""

    vital = frozenset({"sleep", "wake_up", "commit_weights", "forget_cache"})

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__(config, executor, scheduler, clock)
        self.rest = EngineSleepState()

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "forget_cache": self.forget_cache,
            "prepare_weights": self.prepare_weights,
            "commit_weights": self.commit_weights,
            "drop_weights": self._executor.drop_weights,
        }

    def sleep(self, level: int) -> list[str]:
        """Enter a sleep level, or a deeper one; return the tags that sleep."""
        self._core.settle()
        self.begin()
        self._scheduler.pause(self._clock())
        self._drain()
        if level > 0:
            self.forget()  # the worker frees the rows
            self._executor.sleep(level)
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
        if self._core.progress is not None:
            self._core.progress.load()

    def forget(self) -> None:
        """Discard all cached content; waiting requests are computed again. The scheduler is paused."""
        self._scheduler.forget(self._clock())
        self._drain()

    def forget_cache(self) -> None:
        """Discard all cached content of a paused core."""
        self.check_paused()
        self._core.settle()
        self.forget()

    def prepare_weights(self, model_dir: str) -> None:
        """Load weights beside those in use; none if this core was started with them.

        Raises:
            ClientError: the core is not paused, or the weights do not fit.
        """
        self.check_paused()
        if self._core.has_weights_of(model_dir):
            return
        self._core.settle()
        self._core.check_new_weights()
        self.begin()
        try:
            self._executor.prepare_weights(model_dir)
        except StartupError as error:
            words = str(error).replace(f"{model_dir}/", "").replace(model_dir, "the update")
            raise ValidationError(words) from None

    def commit_weights(self, model_dir: str, keeps_cache: bool = False) -> None:
        """Use the prepared weights; nothing computed with the old ones is left.

        With `keeps_cache` running requests keep their blocks, and go on from these with the new weights.
        """
        if self._core.has_weights_of(model_dir):
            return
        self.check_paused()
        self._core.settle()
        self.begin()
        self._drain()
        if keeps_cache:
            self._scheduler.mix(self._clock())
            self._drain()  # the worker frees the rows
        else:
            self.forget()
        self._executor.commit_weights(keeps_cache=keeps_cache)
        self._core.use_weights_of(model_dir)

    def _wake(self, tag: str) -> None:
        rereads = tag == WEIGHTS and self.rest.level > 1
        if rereads:
            self._core.check_files()
        self._executor.wake_up(tag)
        if rereads:
            self._core.check_files()  # files may have changed while they were read

    def _drain(self) -> None:
        """Process the results of steps in flight, and have the worker free removed requests."""
        while self._scheduler.has_work():
            self._core.run_step()
