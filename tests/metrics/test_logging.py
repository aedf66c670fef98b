# SPDX-License-Identifier: Apache-2.0
"""The statistics line: right rates over all cores, and silence when idle."""

from __future__ import annotations

import logging

import pytest

from quire.metrics.logging import LoggingStatLogger
from quire.metrics.stats import IterationStats
from quire.scheduler.feature_stats import AdapterStats, SpecDecodingStats
from quire.scheduler.output import SchedulerStats


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stats(clock: Clock, caplog: pytest.LogCaptureFixture) -> LoggingStatLogger:
    caplog.set_level(logging.INFO, logger="quire.metrics.logging")
    return LoggingStatLogger(clock)


def test_line_and_silence(stats: LoggingStatLogger, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    clock.now += 10
    stats.log()
    assert caplog.messages == []
    tokens = IterationStats(num_prompt_tokens=120, num_cached_tokens=20, num_generation_tokens=50)
    stats.record(tokens, None, 0)
    stats.record(IterationStats(), SchedulerStats(2, 1, 0.125, 0, 120, 30), 0)
    clock.now += 5
    stats.log()
    (line,) = caplog.messages
    assert line == (
        "prompt throughput 20.0 tok/s, generation throughput 10.0 tok/s, running 2, waiting 1, "
        "KV cache usage 12.5 %, prefix cache hit rate 25.0 %"
    )
    caplog.clear()
    stats.record(IterationStats(num_generation_tokens=1), SchedulerStats(0, 0, 0.0, 0, 120, 30), 0)
    clock.now += 1
    stats.log()
    assert caplog.messages[0].endswith("hit rate -")
    caplog.clear()
    drafts = SpecDecodingStats(num_drafts=4, num_draft_tokens=20, num_accepted_tokens=6)
    stats.record(IterationStats(num_generation_tokens=10), SchedulerStats(spec_decoding=drafts), 0)
    clock.now += 1
    stats.log()
    assert caplog.messages[0].endswith(", drafts accepted 30.0 % of 20, mean accepted length 2.50")
    caplog.clear()
    adapters = AdapterStats(["a", "b"], ["b"], 2)
    stats.record(IterationStats(num_generation_tokens=10), SchedulerStats(adapters=adapters), 0)
    clock.now += 1
    stats.log()
    assert caplog.messages[0].endswith("hit rate -, adapters running 2, waiting 1")
    caplog.clear()
    clock.now += 10
    stats.log()
    assert caplog.messages == []


def test_the_line_is_about_all_cores(
    stats: LoggingStatLogger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    stats.record(IterationStats(num_generation_tokens=5), SchedulerStats(2, 1, 0.5, 0, 100, 10), 0)
    stats.record(IterationStats(num_generation_tokens=5), SchedulerStats(1, 3, 0.25, 0, 100, 40), 1)
    clock.now += 1
    stats.log()
    (line,) = caplog.messages
    assert line == (
        "prompt throughput 0.0 tok/s, generation throughput 10.0 tok/s, running 3, waiting 4, "
        "KV cache usage 37.5 %, prefix cache hit rate 25.0 %"
    )


def test_a_core_that_died_is_forgotten(
    stats: LoggingStatLogger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    stats.record(IterationStats(num_generation_tokens=5), SchedulerStats(2, 1, 0.5, 0, 100, 10), 0)
    stats.log()
    stats.core_died(0, num_resumed=1, num_failed=1)
    caplog.clear()
    stats.record(IterationStats(), SchedulerStats(1, 0, 0.25, 0, 20, 10), 0)
    clock.now += 1
    stats.log()
    assert "running 1, waiting 0" in caplog.messages[0]
    assert caplog.messages[0].endswith("hit rate 50.0 %")
