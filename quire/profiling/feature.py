# SPDX-License-Identifier: Apache-2.0
"""Profiles of one engine core: `start_profile` and `stop_profile`, by torch's profiler or Python's cProfile.

Invariant: a profile is started and stopped in one thread, the worker's, and covers that thread. A profile changes no
result. Files are written to the operator's directory only.
"""

from __future__ import annotations

import cProfile
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.config.observability import ProfilerSettings
from quire.engine.core_feature import CoreFeature
from quire.engine.step_loop import Clock
from quire.errors import ValidationError
from quire.executor.base import Executor
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


class Profiler(ABC):
    """One profile."""

    suffix: str

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self, path: Path) -> None:
        """End the profile and write it."""


class TorchProfiler(Profiler):
    """Operators and kernels with their times, as a trace for Perfetto or chrome://tracing."""

    def __init__(self, settings: ProfilerSettings) -> None:
        from torch.profiler import profile  # with torch, which the worker has loaded

        self.suffix = ".pt.trace.json" + ".gz" * settings.torch_profiler_use_gzip
        self._profile: Any = profile(
            with_stack=settings.torch_profiler_with_stack,
            record_shapes=settings.torch_profiler_record_shapes,
            profile_memory=settings.torch_profiler_with_memory,
        )

    def start(self) -> None:
        self._profile.start()

    def stop(self, path: Path) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))


class PythonProfiler(Profiler):
    """Python functions with calls and times, quire's C++ kernels among them; for pstats or snakeviz."""

    suffix = ".prof"

    def __init__(self, settings: ProfilerSettings) -> None:
        self._profile = cProfile.Profile()

    def start(self) -> None:
        self._profile.enable()

    def stop(self, path: Path) -> None:
        self._profile.disable()
        self._profile.dump_stats(path)


PROFILERS: Mapping[str, Callable[[ProfilerSettings], Profiler]] = {
    "torch": TorchProfiler,
    "cprofile": PythonProfiler,
}


def path_for(settings: ProfilerSettings, core: int, number: int, suffix: str) -> Path:
    """Return the path of a profile in the operator's directory, which is made if necessary."""
    directory = Path(settings.torch_profiler_dir).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"quire-core{core}-{os.getpid()}-{number}{suffix}"
