"""Metrics: names, values, and that totals of the scheduler are counted once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from quire.metrics.buckets import token_buckets
from quire.metrics.prometheus import PrometheusStatLogger
from quire.metrics.stats import FinishedRequestStats, IterationStats
from quire.scheduler.output import SchedulerStats

LABELS = {"model_name": "m", "engine": "0"}
FINISHED = FinishedRequestStats(
    finish_reason="stop",
    num_prompt_tokens=10,
    num_generation_tokens=5,
    num_cached_tokens=4,
    num_preemptions=1,
    max_tokens=16,
    e2e_s=3.0,
    queue_s=0.5,
    prefill_s=0.5,
    decode_s=2.0,
)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.logger = PrometheusStatLogger("m", 100, registry=self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"quire:{name}", {**LABELS, **labels})


def test_one_step() -> None:
    metrics = Metrics()
    iteration = IterationStats(
        10, 4, 3, time_to_first_token_s=[0.2], inter_token_s=[0.1, 0.3], finished=[FINISHED]
    )
    metrics.logger.record(iteration, SchedulerStats(2, 7, 0.25, 1, 10, 4))
    expected = {
        "num_requests_running": 2, "num_requests_waiting": 7, "kv_cache_usage_perc": 0.25,
        "num_preemptions_total": 1, "prefix_cache_queries_total": 10, "prefix_cache_hits_total": 4,
        "prompt_tokens_total": 10, "prompt_tokens_cached_total": 4, "generation_tokens_total": 3,
        "time_to_first_token_seconds_sum": 0.2, "inter_token_latency_seconds_count": 2,
        "inter_token_latency_seconds_sum": 0.4, "request_time_per_output_token_seconds_sum": 0.5,
        "e2e_request_latency_seconds_sum": 3.0, "request_queue_time_seconds_sum": 0.5,
        "request_prefill_time_seconds_sum": 0.5, "request_decode_time_seconds_sum": 2.0,
        "request_inference_time_seconds_sum": 2.5, "request_prompt_tokens_sum": 10,
        "request_generation_tokens_sum": 5, "request_params_max_tokens_sum": 16, "iteration_tokens_total_sum": 9,
    }  # fmt: skip
    assert {name: metrics.value(name) for name in expected} == expected
    assert metrics.value("request_success_total", finished_reason="stop") == 1
    assert metrics.value("request_success_total", finished_reason="length") == 0


def test_scheduler_totals_become_increments() -> None:
    metrics = Metrics()
    for hits in (3, 3, 8, 2):  # the last is a restarted core, whose count began again
        metrics.logger.record(IterationStats(), SchedulerStats(prefix_cache_hits=hits))
    assert metrics.value("prefix_cache_hits_total") == 8
    metrics.logger.record(IterationStats(), None)
    assert metrics.value("iteration_tokens_total_count") == 0


def test_unknown_reason_adds_no_label() -> None:
    metrics = Metrics()
    before = len(generate_latest(metrics.registry).splitlines())
    FINISHED_ODDLY = FinishedRequestStats("odd", 1, 1, 0, 0, None, 0.1, 0.0, 0.0, 0.0)
    metrics.logger.record(IterationStats(finished=[FINISHED_ODDLY]), None)
    assert metrics.value("request_success_total", finished_reason="error") == 1
    assert len(generate_latest(metrics.registry).splitlines()) == before


def test_two_loggers_in_one_process() -> None:
    first, second = Metrics(), Metrics()
    first.logger.record(IterationStats(num_generation_tokens=1), None)
    assert second.value("generation_tokens_total") == 0


def test_token_buckets() -> None:
    assert token_buckets(100) == [1, 2, 5, 10, 20, 50, 100]
    assert token_buckets(1) == [1]
