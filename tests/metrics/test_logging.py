"""The statistics line: right rates, and silence when idle."""

from __future__ import annotations

import logging

import pytest

from quire.metrics.logging import LoggingStatLogger
from quire.metrics.stats import IterationStats
from quire.scheduler.output import SchedulerStats


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_line_and_silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire.metrics.logging")
    clock = Clock()
    stats = LoggingStatLogger(clock)
    clock.now += 10
    stats.log()
    assert caplog.messages == []
    stats.record(IterationStats(num_prompt_tokens=120, num_cached_tokens=20, num_generation_tokens=50), None)
    stats.record(IterationStats(), SchedulerStats(2, 1, 0.125, 0, 120, 30))
    clock.now += 5
    stats.log()
    (line,) = caplog.messages
    assert line == (
        "prompt throughput 20.0 tok/s, generation throughput 10.0 tok/s, running 2, waiting 1, "
        "KV cache usage 12.5 %, prefix cache hit rate 25.0 %"
    )
    caplog.clear()
    stats.record(IterationStats(num_generation_tokens=1), SchedulerStats(0, 0, 0.0, 0, 120, 30))
    clock.now += 1
    stats.log()
    assert caplog.messages[0].endswith("hit rate -")
    caplog.clear()
    clock.now += 10
    stats.log()
    assert caplog.messages == []
