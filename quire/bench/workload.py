# SPDX-License-Identifier: Apache-2.0
"""Workloads (random prompts, arrival times), kernel cases and summary statistics.

Invariant: workloads depend only on the seed, not on clocks or global randomness. Percentiles interpolate linearly
between order statistics (Hyndman & Fan 1996, type 7).
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelCase:
    """One op at one shape; `flops` and `num_bytes` are the minimum of a call."""

    name: str
    rows: int
    run: Callable[[], object]
    flops: float
    num_bytes: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` % of `values` lie; 0.0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0.0 without values."""
    return statistics.fmean(values) if values else 0.0


def standard_deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation; 0.0 without values."""
    return statistics.pstdev(values) if values else 0.0


def random_prompts(num_prompts: int, num_tokens: int, token_ids: Sequence[int], seed: int) -> list[list[int]]:
    """Return prompts of `num_tokens` ids, each drawn uniformly from `token_ids`."""
    generator = random.Random(seed)
    return [generator.choices(token_ids, k=num_tokens) for _ in range(num_prompts)]


def arrival_times(num_requests: int, rate_per_s: float, seed: int) -> list[float]:
    """Return arrival times in seconds of a Poisson process from 0; an infinite rate sends all at once."""
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    generator = random.Random(seed)
    gaps = (generator.expovariate(rate_per_s) for _ in range(num_requests - 1))
    return list(itertools.accumulate(gaps, initial=0.0))[:num_requests]
