"""Summaries of measured values.

Invariant: percentiles interpolate linearly between order statistics (Hyndman & Fan 1996, type 7).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of `values` lie; 0.0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def mean(values: Sequence[float]) -> float:
    """The mean; 0.0 without values."""
    return statistics.fmean(values) if values else 0.0


def standard_deviation(values: Sequence[float]) -> float:
    """The population's standard deviation; 0.0 without values."""
    return statistics.pstdev(values) if values else 0.0
