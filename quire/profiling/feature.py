# SPDX-License-Identifier: Apache-2.0
"""Profiles of one engine core: `start_profile` and `stop_profile`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from quire.config import EngineConfig
from quire.engine.core_feature import CoreFeature
from quire.engine.step_loop import Clock
from quire.errors import ValidationError
from quire.executor.base import Executor
from quire.profiling.profiler import PROFILERS, Profiler, path_for
from quire.scheduler.output import RequestUpdate
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class StepProfiler(CoreFeature):
    """Profiler of one core's worker; a profile ends by itself after `max_iterations` steps, which bounds its memory."""

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__(config, executor, scheduler, clock)
        self._settings = config.observability.profiler
        self._core_index = 0 if config.share is None else config.share.index
        self._running: Profiler | None = None
        self._num_steps = 0
        self._num_profiles = 0

    @staticmethod
    def is_wanted(config: EngineConfig) -> bool:
        return config.observability.profiler.profiler is not None

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {"start_profile": self.start, "stop_profile": self.stop}

    def start(self) -> bool:
        """Start a profile.

        Raises:
            ValidationError: one is running, or another profiler is active in this process.
            ValidationError: the worker is in another process.
        """
        if self._running is not None:
            raise ValidationError("a profile is running; stop it first")
        profiler = PROFILERS[str(self._settings.profiler)](self._settings)
        self._on_worker(profiler.start)
        self._running, self._num_steps = profiler, 0
        return True

    def stop(self) -> str:
        """End the profile, and return the path of its file.

        Raises:
            ValidationError: none is running, or its file cannot be written.
        """
        if self._running is None:
            raise ValidationError("no profile is running; start one first")
        profiler, self._running = self._running, None
        self._num_profiles += 1
        written: list[str] = []

        def write() -> None:
            path = path_for(self._settings, self._core_index, self._num_profiles, profiler.suffix)
            profiler.stop(path)
            written.append(str(path))

        self._on_worker(write)
        logger.info("profile of %d steps: %s", self._num_steps, written[0])
        return written[0]

    def stepped(self, updates: list[RequestUpdate]) -> None:
        if self._running is None:
            return
        self._num_steps += 1
        if self._num_steps >= self._settings.max_iterations:
            try:
                self.stop()
            except ValidationError as error:  # no request waits for this profile
                logger.error("%s", error)

    def close(self) -> None:
        if self._running is not None:
            self.stop()

    def _on_worker(self, call: Callable[[], None]) -> None:
        """Run a call in the worker's thread.

        Raises:
            ValidationError: it failed.
        """
        try:
            self._executor.run_on_worker(lambda worker: call())
        except ValidationError:
            raise
        except Exception as error:
            raise ValidationError(f"the profiler failed: {error}") from error
