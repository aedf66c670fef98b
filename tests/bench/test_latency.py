# SPDX-License-Identifier: Apache-2.0
"""Latency arithmetic."""

from __future__ import annotations

import pytest

from quire.bench.latency import measure
from tests.bench.fake_backend import FakeBackend, FakeClock


def test_warm_up_is_not_timed() -> None:
    clock = FakeClock()
    backend = FakeBackend("quire", clock, [100.0, 1.0, 2.0, 3.0])
    result = measure(backend, [[[9]]], [[[1]], [[2]], [[3]]], 5, clock)
    assert list(result.latencies) == [1.0, 2.0, 3.0]
    assert [prompts for prompts, _ in backend.batches] == [[[9]], [[1]], [[2]], [[3]]]
    assert result.lines()[0] == "Avg latency: 2.0000 seconds"
    assert result.lines()[3] == "50% percentile latency: 2.0000 seconds"
    content = result.as_json()
    assert content["avg_latency"] == 2.0
    assert content["latencies"] == [1.0, 2.0, 3.0]
    assert content["percentiles"] == pytest.approx(
        {"10": 1.2, "25": 1.5, "50": 2.0, "75": 2.5, "90": 2.8, "99": 2.98}
    )
