# SPDX-License-Identifier: Apache-2.0
"""Metrics: names, values, cores, and that totals of the scheduler are counted once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from quire.config import EngineConfig
from quire.metrics.catalog import METRICS, Distribution, VllmNames, make_family, token_buckets
from quire.metrics.prometheus import PrometheusStatLogger
from quire.metrics.stats import EndedRequest, FinishedRequestStats, IterationStats
from quire.outputs import RequestStateStats
from quire.sampling_params import SamplingParams
from quire.scheduler.feature_stats import AdapterStats, SpecDecodingStats
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
ENDED = EndedRequest("r", SamplingParams(n=2), 2, ["stop", "stop"], 10, 4, 8, 5, RequestStateStats(), 0.0, {})


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.logger = PrometheusStatLogger("m", 100, registry=self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"quire:{name}", {**LABELS, **labels})

    def values(self, names: dict[str, float]) -> dict[str, float | None]:
        return {name: self.value(name) for name in names}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@given(st.lists(st.integers(0, 40).map(lambda number: number / 8)))
def test_observing_at_once_equals_one_by_one(amounts: list[float]) -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    wanted, found = (
        kind("x", "", ["a"], buckets=(1.0, 2.0, 4.0), registry=registry).labels("b")
        for kind, registry in zip((Histogram, Distribution), registries, strict=True)
    )
    for amount in amounts:
        wanted.observe(amount)
    found.observe_all(amounts)
    expected, seen = (
        [sample for metric in registry.collect() for sample in metric.samples if sample.name != "x_created"]
        for registry in registries
    )
    assert seen == expected


def test_one_step(metrics: Metrics) -> None:
    iteration = IterationStats(
        10, 4, 3, time_to_first_token_s=[0.2], inter_token_s=[0.1, 0.3], finished=[FINISHED], ended=[ENDED]
    )
    scheduler = SchedulerStats(2, 7, 0.25, 1, 10, 4, num_swaps=1, host_cache_usage=0.5, num_held=3)
    metrics.logger.record(iteration, scheduler, 0)
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
        "request_prefill_kv_computed_tokens_sum": 6, "request_num_preemptions_sum": 1, "request_params_n_sum": 2,
        "request_max_num_generation_tokens_sum": 5, "num_swaps_total": 1, "host_cache_usage_perc": 0.5,
    }  # fmt: skip
    assert metrics.values(expected) == expected
    assert metrics.value("request_success_total", finished_reason="stop") == 1
    assert metrics.value("request_success_total", finished_reason="length") == 0
    assert metrics.value("num_requests_waiting_by_reason", reason="capacity") == 4
    assert metrics.value("num_requests_waiting_by_reason", reason="deferred") == 3
    assert metrics.value("prompt_tokens_by_source_total", source="local_compute") == 6
    assert metrics.value("prompt_tokens_by_source_total", source="local_cache_hit") == 4


def test_a_fork_adds_no_prompt(metrics: Metrics) -> None:
    fork = FinishedRequestStats("stop", 10, 5, 10, 0, 16, 3.0, 0.5, 0.5, 2.0, is_fork=True)
    metrics.logger.record(IterationStats(finished=[FINISHED, fork]), None, 0)
    assert metrics.value("request_prompt_tokens_sum") == 10
    assert metrics.value("request_prompt_tokens_count") == 1
    assert metrics.value("request_generation_tokens_count") == 2


def test_draft_counts_are_exported(metrics: Metrics) -> None:
    spec = SpecDecodingStats()
    for num_drafts, num_accepted in ((4, 2), (3, 0), (30, 20)):
        spec.note(num_drafts, num_accepted)
        metrics.logger.record(IterationStats(), SchedulerStats(spec_decoding=spec.copy()), 0)
    assert metrics.value("spec_decode_num_drafts_total") == 3
    assert metrics.value("spec_decode_num_draft_tokens_total") == 37
    assert metrics.value("spec_decode_num_accepted_tokens_total") == 22
    places = [
        metrics.value("spec_decode_num_accepted_tokens_per_pos_total", position=str(place))
        for place in range(64)
    ]
    assert places == [2, 2, *[1] * 18, *[0] * 44]


def test_scheduler_totals_become_increments(metrics: Metrics) -> None:
    for hits in (3, 3, 8):
        metrics.logger.record(IterationStats(), SchedulerStats(prefix_cache_hits=hits), 0)
    assert metrics.value("prefix_cache_hits_total") == 8
    metrics.logger.core_died(0, num_resumed=0, num_failed=0)
    metrics.logger.record(IterationStats(), SchedulerStats(prefix_cache_hits=2), 0)
    assert metrics.value("prefix_cache_hits_total") == 10, "the next core counts from zero"
    metrics.logger.record(IterationStats(), None, 0)
    assert metrics.value("iteration_tokens_total_count") == 0


def test_each_core_has_its_own_numbers(metrics: Metrics) -> None:
    for core, (running, hits) in enumerate([(3, 5), (4, 7)]):
        scheduler = SchedulerStats(num_running=running, prefix_cache_hits=hits)
        metrics.logger.record(IterationStats(num_generation_tokens=running), scheduler, core)
    for engine, running, hits in (("0", 3, 5), ("1", 4, 7)):
        assert metrics.value("num_requests_running", engine=engine) == running
        assert metrics.value("generation_tokens_total", engine=engine) == running
        assert metrics.value("prefix_cache_hits_total", engine=engine) == hits


def test_a_death_is_counted_and_leaves_nothing_behind(metrics: Metrics) -> None:
    config = EngineConfig.from_args(block_size=32, kv_cache_dtype="int8")
    metrics.logger.core_ready(0, config, 70)
    about = {"block_size": "32", "cache_dtype": "int8", "engine": "0"}
    for name, value in (("num_gpu_blocks", "70"), ("num_gpu_blocks", "71")):
        (family,) = [one for one in metrics.registry.collect() if one.name == "quire:cache_config_info"]
        (sample,) = family.samples
        assert about.items() <= sample.labels.items()
        assert sample.labels[name] == value
        assert metrics.value("engine_core_up") == 1
        metrics.logger.record(IterationStats(), SchedulerStats(5, 1, 0.5), 0)
        metrics.logger.core_died(0, num_resumed=4, num_failed=2)
        died = {
            "engine_core_up": 0,
            "num_requests_running": 0,
            "kv_cache_usage_perc": 0,
            "num_requests_waiting": 4,
        }
        assert metrics.values(died) == died
        metrics.logger.core_ready(0, config, 71)
        metrics.logger.record(IterationStats(), SchedulerStats(), 0)
        assert metrics.value("num_requests_waiting") == 0
    totals = {"engine_core_deaths_total": 2, "engine_core_resumed_requests_total": 8}
    assert metrics.values(totals) == totals
    assert metrics.value("engine_core_failed_requests_total") == 4


def test_unknown_reason_adds_no_label(metrics: Metrics) -> None:
    before = len(generate_latest(metrics.registry).splitlines())
    oddly = FinishedRequestStats("odd", 1, 1, 0, 0, None, 0.1, 0.0, 0.0, 0.0)
    metrics.logger.record(IterationStats(finished=[oddly]), None, 0)
    assert metrics.value("request_success_total", finished_reason="error") == 1
    assert len(generate_latest(metrics.registry).splitlines()) == before


def test_two_loggers_in_one_process() -> None:
    first, second = Metrics(), Metrics()
    first.logger.record(IterationStats(num_generation_tokens=1), None, 0)
    assert second.value("generation_tokens_total") == 0


def test_the_names_of_vllm_stand_for_the_same_numbers(metrics: Metrics) -> None:
    metrics.logger.record(IterationStats(10, 4, 3, inter_token_s=[0.1]), SchedulerStats(2), 0)
    ours, theirs = (
        generate_latest(metrics.registry).decode(),
        generate_latest(VllmNames(metrics.registry)).decode(),
    )
    own = {f"quire:{metric.name}" for metric in METRICS if metric.vllm is None}
    assert own
    for mine, other in zip(ours.splitlines(), theirs.splitlines(), strict=True):
        is_own = any(name in mine for name in own)
        assert other == (mine if is_own else mine.replace("quire:", "vllm:"))
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 3.0' in theirs
    assert 'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.1",model_name="m"} 1.0' in theirs


def test_http_requests_are_counted_as_vllm_dashboards_expect(metrics: Metrics) -> None:
    requests = make_family("http_requests", metrics.registry)
    durations = make_family("http_request_duration_seconds", metrics.registry)
    for handler, status in (("/a", "500"), ("/a", "503"), ("/a", "200"), ("/health", "503")):
        requests.labels("POST", handler, status).inc()
        durations.labels("POST", handler).observe(0.01)
    shown = [
        line for line in generate_latest(VllmNames(metrics.registry)).decode().splitlines() if "http_" in line
    ]
    counted = {line for line in shown if line.startswith("http_requests_total")}
    assert counted == {
        'http_requests_total{handler="/a",method="POST",status="5xx"} 2.0',
        'http_requests_total{handler="/a",method="POST",status="2xx"} 1.0',
    }
    assert 'http_request_duration_seconds_count{handler="/a",method="POST"} 3.0' in shown
    assert not any("/health" in line for line in shown)
    assert requests.labels("POST", "/health", "503")._value.get() == 1, "the registry is as it was"


def test_an_engine_without_sleep_is_awake_once_it_is_ready(metrics: Metrics) -> None:
    assert metrics.value("engine_sleep_state", sleep_state="awake") == 0
    metrics.logger.core_ready(0, EngineConfig.from_args(), 7)
    assert metrics.value("engine_sleep_state", sleep_state="awake") == 1
    assert metrics.value("engine_sleep_state", sleep_state="discard_all") == 0


def test_token_buckets() -> None:
    assert token_buckets(100) == [1, 2, 5, 10, 20, 50, 100]
    assert token_buckets(1) == [1]


def test_adapters_of_all_names_are_one_series(metrics: Metrics) -> None:
    def samples() -> list[dict[str, str]]:
        (family,) = [one for one in metrics.registry.collect() if one.name == "quire:lora_requests_info"]
        return [sample.labels for sample in family.samples]

    metrics.logger.record(IterationStats(), SchedulerStats(), 0)
    assert samples() == []
    for number in range(5):
        adapters = AdapterStats([f"a{number}", "b"], ["c"], 4)
        metrics.logger.record(IterationStats(), SchedulerStats(adapters=adapters), 0)
        assert samples() == [
            {"max_lora": "4", "running_lora_adapters": f"a{number},b", "waiting_lora_adapters": "c"}
        ]


def test_replicas_are_labeled_and_their_adapters_are_one_series() -> None:
    registry = CollectorRegistry()
    logger = PrometheusStatLogger("m", 100, registry=registry, first_engine=2, num_engines=2)
    for core, name in enumerate(("b", "a")):
        stats = SchedulerStats(num_running=core + 5, adapters=AdapterStats([name], [], 4))
        logger.record(IterationStats(), stats, core)
    running = {
        sample.labels["engine"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if family.name == "quire:num_requests_running"
    }
    assert running == {"2": 5, "3": 6}
    labels = {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": ""}
    assert registry.get_sample_value("quire:lora_requests_info", labels)
