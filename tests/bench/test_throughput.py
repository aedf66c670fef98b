# SPDX-License-Identifier: Apache-2.0
"""Throughput arithmetic, and the order of a comparison."""

from __future__ import annotations

import pytest

from quire.bench.throughput import ThroughputResult, compare, measure, warm_up
from tests.bench.fake_backend import FakeBackend, FakeClock

BATCH = [[1, 2, 3], [4, 5, 6]]


def test_known_numbers() -> None:
    clock = FakeClock()
    result = measure(FakeBackend("quire", clock, [4.0]), BATCH, 10, clock)
    assert result == ThroughputResult(4.0, 2, 6, 20)
    assert result.as_json() == {
        "elapsed_time": 4.0,
        "num_requests": 2,
        "total_num_tokens": 26,
        "requests_per_second": 0.5,
        "tokens_per_second": 6.5,
        "output_tokens_per_second": 5.0,
    }
    assert result.lines() == [
        "Throughput: 0.50 requests/s, 6.50 total tokens/s, 5.00 output tokens/s",
        "Total num prompt tokens:  6",
        "Total num output tokens:  20",
    ]


def test_warm_up_caches_no_prefix_of_a_measured_prompt() -> None:
    backend = FakeBackend("quire", FakeClock(), [1.0])
    warm_up(backend, BATCH)
    assert backend.batches == [([[3, 2, 1]], 2)]


def test_comparison_alternates_and_takes_medians() -> None:
    clock, log = FakeClock(), []
    first = FakeBackend("quire", clock, [1.0, 50.0, 2.0], log)
    second = FakeBackend("hf", clock, [4.0, 3.0, 5.0], log)
    batches = [[[1], [2]], [[3], [4]], [[5], [6]]]
    comparison = compare(first, second, batches, 10, clock)
    assert log == ["quire", "hf", "hf", "quire", "quire", "hf"]
    assert [prompts for prompts, _ in first.batches] == [prompts for prompts, _ in second.batches] == batches
    assert comparison.medians() == (10.0, 5.0)
    assert comparison.ratio == 2.0
    assert comparison.lines()[-1] == "Ratio of medians, quire to hf: 2.000"
    repeats = comparison.as_json()["repeats"]
    assert isinstance(repeats, dict)
    assert [one["elapsed_time"] for one in repeats["hf"]] == pytest.approx([4.0, 3.0, 5.0])
