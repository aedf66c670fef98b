# SPDX-License-Identifier: Apache-2.0
"""The metrics of several processes are those that one would have."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.entrypoints.openai.metrics import MergedMetrics, families_of
from quire.metrics.prometheus import PrometheusStatLogger
from quire.metrics.stats import FinishedRequestStats, IterationStats
from quire.scheduler.output import SchedulerStats


class Measured:
    """Metrics of one API process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats = PrometheusStatLogger("m", 100, registry=self.registry)
        self.requests = Counter("quire:http_requests", "Requests.", ["status"], registry=self.registry)
        self.open = Gauge("quire:http_open", "Open.", registry=self.registry)

    def count(self, num_tokens: int, status: str) -> None:
        request = FinishedRequestStats("stop", 3, num_tokens, 0, 0, None, 0.4, 0.1, 0.2, 0.1)
        stats = IterationStats(num_prompt_tokens=3, num_generation_tokens=num_tokens, finished=[request])
        stats.time_to_first_token_s = [num_tokens / 10]
        self.stats.record(stats, None, 0)
        self.requests.labels(status).inc()
        self.open.inc()


def values(text: bytes) -> dict[str, float]:
    """Series -> value, but for when it began; each is there once."""
    lines = [
        line for line in text.decode().splitlines() if not line.startswith("#") and "_created" not in line
    ]
    series = dict(line.rsplit(" ", 1) for line in lines)
    assert len(series) == len(lines)
    return {name: float(value) for name, value in series.items()}


events = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 20), st.sampled_from(["200", "429"])), max_size=12
)


@given(events)
def test_counters_of_processes_add_up(counts: list[tuple[int, int, str]]) -> None:
    one, several = Measured(), [Measured() for _ in range(3)]
    for process, num_tokens, status in counts:
        one.count(num_tokens, status)
        several[process].count(num_tokens, status)
    merged = values(generate_latest(MergedMetrics([families_of(each.registry) for each in several])))
    expected = values(generate_latest(one.registry))
    assert merged.keys() == expected.keys()
    assert all(math.isclose(merged[name], expected[name]) for name in expected)


def test_engine_state_is_from_the_first_process() -> None:
    first, other = Measured(), Measured()
    first.stats.record(IterationStats(), SchedulerStats(num_running=3, num_waiting=2, kv_cache_usage=0.5), 0)
    merged = values(
        generate_latest(MergedMetrics([families_of(first.registry), families_of(other.registry)]))
    )
    state = {name.partition("{")[0]: value for name, value in merged.items()}
    assert state["quire:num_requests_running"] == 3
    assert state["quire:num_requests_waiting"] == 2
    assert state["quire:kv_cache_usage_perc"] == 0.5


def test_core_death_counts_once_and_losses_of_processes_add_up() -> None:
    processes = [Measured() for _ in range(3)]
    for number, process in enumerate(processes):
        process.stats.core_died(0, number, 1)
    merged = values(generate_latest(MergedMetrics([families_of(each.registry) for each in processes])))
    seen = {name.partition("{")[0]: value for name, value in merged.items()}
    assert seen["quire:engine_core_deaths_total"] == 1
    assert seen["quire:engine_core_resumed_requests_total"] == 3
    assert seen["quire:engine_core_failed_requests_total"] == 3


def test_a_series_began_when_its_first_process_did() -> None:
    answers: list[Any] = [
        [["c", "C.", "counter", [["c_total", {}, 1.0], ["c_created", {}, began]]]]
        for began in (30.0, 10.0, 20.0)
    ]
    text = generate_latest(MergedMetrics(answers)).decode()
    assert "c_total 3.0" in text
    assert "c_created 10.0" in text


def test_merging_twice_changes_nothing() -> None:
    registry = CollectorRegistry()
    Histogram("h", "H.", ["x"], registry=registry, buckets=[1, 2]).labels("y").observe(1.5)
    once = MergedMetrics([families_of(registry)])
    assert (
        generate_latest(MergedMetrics([families_of(once), []]))
        == generate_latest(once)
        == generate_latest(registry)
    )
