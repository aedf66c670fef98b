# SPDX-License-Identifier: Apache-2.0
"""Summaries on known numbers, and percentiles against the standard library's."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.bench.workload import mean, percentile, standard_deviation

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50)


def test_known_numbers() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([4, 1, 3, 2], 0) == 1
    assert percentile([4, 1, 3, 2], 100) == 4
    assert percentile(range(101), 99) == 99
    assert percentile([7], 99) == 7
    assert mean([1, 2, 6]) == 3
    assert standard_deviation([2, 4]) == 1


def test_no_values() -> None:
    assert (percentile([], 50), mean([]), standard_deviation([])) == (0.0, 0.0, 0.0)


@settings(derandomize=True, deadline=None)
@given(VALUES)
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    oracle = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, percent) for percent in range(1, 100)] == pytest.approx(
        oracle, rel=1e-9, abs=1e-6
    )
