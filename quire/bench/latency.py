# SPDX-License-Identifier: Apache-2.0
"""Offline latency: time of one batch from prompt to last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.bench.backends import Backend, Prompts
from quire.bench.workload import mean, percentile

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class LatencyResult:
    """Seconds of each measured batch."""

    latencies: Sequence[float]

    def percentiles(self) -> dict[int, float]:
        """Return percent -> seconds."""
        return {percent: percentile(self.latencies, percent) for percent in PERCENTILES}

    def lines(self) -> list[str]:
        """Return the result as text."""
        rows = [
            f"{percent}% percentile latency: {value:.4f} seconds"
            for percent, value in self.percentiles().items()
        ]
        return [f"Avg latency: {mean(self.latencies):.4f} seconds", *rows]

    def as_json(self) -> dict[str, object]:
        """Return the result; all values in seconds."""
        return {
            "avg_latency": mean(self.latencies),
            "latencies": list(self.latencies),
            "percentiles": {str(percent): value for percent, value in self.percentiles().items()},
        }


def measure(
    backend: Backend,
    warm_up_batches: Sequence[Prompts],
    batches: Sequence[Prompts],
    output_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyResult:
    """Run the warm-up batches, then time each of the others; all differ, so that no prefix is cached."""
    for prompts in warm_up_batches:
        backend.generate(prompts, output_len)
    latencies = []
    for prompts in batches:
        start_s = clock()
        backend.generate(prompts, output_len)
        latencies.append(clock() - start_s)
    return LatencyResult(latencies)
