# SPDX-License-Identifier: Apache-2.0
"""Profilers of the worker's thread: torch's, or Python's cProfile.

Invariant: a profile is started and stopped in one thread, the worker's, and covers that thread. A profile changes no
result. Files are written to the operator's directory only.
"""

from __future__ import annotations

import cProfile
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.config.observability import ProfilerSettings


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
