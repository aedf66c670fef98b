# SPDX-License-Identifier: Apache-2.0
"""Start-up benchmark: time from the command to the first token of fresh processes, by phase.

Invariant: phases follow one another without a gap, so their seconds add up to the total.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from subprocess import PIPE

import msgspec

from quire.bench.workload import percentile
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.processes import start_python

Run = dict[str, float]
"""Phase -> seconds, in the order in which the phases ended."""

FirstToken = Callable[[EngineConfig], Run]


@dataclass(frozen=True)
class StartupResult:
    """Phases of each measured start."""

    runs: Sequence[Run]

    @property
    def totals(self) -> list[float]:
        """Seconds from the command to the first token, for each start."""
        return [sum(run.values()) for run in self.runs]

    def medians(self) -> Run:
        """Return the median seconds of each phase over the starts."""
        return {phase: percentile([run[phase] for run in self.runs], 50) for phase in self.runs[0]}

    def lines(self) -> list[str]:
        """Return the result as a table for people."""
        totals = self.totals
        rows = [f"{phase:22} {seconds:7.2f}" for phase, seconds in self.medians().items()]
        whole = f"{'command to first token':22} {percentile(totals, 50):7.2f}"
        spread = f"   ({min(totals):.2f} to {max(totals):.2f})"
        return [f"{'phase':22} seconds   (median of {len(totals)})", *rows, whole + spread]

    def as_json(self) -> dict[str, object]:
        """Return the result for programs; all values in seconds."""
        return {
            "median_startup_time": percentile(self.totals, 50),
            "startup_times": self.totals,
            "median_phases": self.medians(),
            "phases": list(self.runs),
        }


def first_token(config: EngineConfig) -> Run:
    """Start an engine in a new process and generate one token.

    Raises:
        StartupError: the process failed; the message is its own.
    """
    from quire.engine.core_start import (
        core_environment,
    )  # a slow import, and `quire --help` imports this module

    program = ["-m", "quire.bench.startup_process", str(time.monotonic())]
    with start_python(program, core_environment(os.environ), stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        out, errors = process.communicate(config.encoded())
    if process.returncode:
        raise StartupError(errors.decode().strip().rpartition("\n")[2])
    return msgspec.json.decode(out, type=Run)


def measure(
    config: EngineConfig, num_warmup: int, num_iters: int, start: FirstToken = first_token
) -> StartupResult:
    """Measure repeated starts; the first `num_warmup`, which fill the system's file caches, do not count."""
    runs = [start(config) for _ in range(num_warmup + num_iters)]
    return StartupResult(runs[num_warmup:])
