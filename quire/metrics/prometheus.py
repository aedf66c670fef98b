# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics from the engine's statistics.

Invariant: label values are closed sets, except for adapter names, which have a single series. Every metric lives in
the given registry, so several engines (and tests) can share a process. Each core has its own label `engine`.
"""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry

from quire.config import EngineConfig
from quire.metrics.catalog import (
    ADAPTERS_INFO,
    BY_NAME,
    CACHE_CONFIG_LABELS,
    ENGINE,
    FINISH_REASONS,
    METRICS,
    SLEEP_STATES,
    make_family,
)
from quire.metrics.stats import EndedRequest, FinishedRequestStats, IterationStats, StatLogger
from quire.scheduler.feature_stats import (
    AdapterStats,
    EncoderStats,
    SpecDecodingStats,
    StoreStats,
    TransferStats,
)
from quire.scheduler.output import SchedulerStats

GAUGES = {
    "num_requests_running": "num_running",
    "kv_cache_usage_perc": "kv_cache_usage",
    "host_cache_usage_perc": "host_cache_usage",
    "saturation": "saturation",
    "estimated_queue_seconds": "queue_s",
}  # Metric -> field of SchedulerStats.
DRAFT_TOTALS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
STORE_GAUGES = {
    "kv_store_blocks": "num_rows",
    "kv_store_bytes": "num_bytes",
    "kv_store_resting": "is_resting",
}
STORE_TOTALS = {
    "kv_store_loaded_blocks": "num_loaded",
    "kv_store_saved_blocks": "num_saved",
    "kv_store_unsaved_blocks": "num_unsaved",
    "kv_store_failed_loads": "num_failed_loads",
    "kv_store_corrupt_blocks": "num_corrupt",
    "kv_store_evicted_blocks": "num_evicted",
    "kv_store_timeouts": "num_timeouts",
    "kv_store_reloads": "num_reloads",
}  # Metric -> field of StoreStats.
ENCODER_USAGE = "encoder_cache_usage_perc"
ENCODER_TOTALS = {
    "encoder_cache_hits": "num_hits",
    "encoder_cache_misses": "num_misses",
    "encoder_seconds": "encode_s",
    "encoder_failures": "num_failed",
}  # Metric -> field of EncoderStats.
TRANSFER_GAUGES = {"kv_transfer_leases": "num_leases", "kv_transfer_oldest_lease_seconds": "oldest_lease_s"}
TRANSFER_TOTALS = {
    "kv_transfer_offers": "num_offers",
    "kv_transfer_offered_blocks": "num_offered",
    "kv_transfer_unoffered_blocks": "num_unoffered",
    "kv_transfer_pulls": "num_pulls",
    "kv_transfer_failed_pulls": "num_failed_pulls",
    "kv_transfer_pulled_blocks": "num_pulled",
}  # Metric -> field of TransferStats.
TOTALS = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "num_swaps")


class PrometheusStatLogger(StatLogger):
    """Stat logger that turns every step's statistics into metrics.

    Args:
        model_name: label of most metrics.
        max_model_len: bounds the token histograms.
        registry: where the metrics are registered.
        first_engine: the label of the first core; the others count up from it.
        num_engines: cores that exist from the start.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        *,
        registry: CollectorRegistry,
        first_engine: int = 0,
        num_engines: int = 1,
    ) -> None:
        self._model_name = model_name
        self._first_engine = first_engine
        names = [metric.name for metric in METRICS if metric.labels[:2] == ENGINE]
        self._families = {name: make_family(name, registry, max_model_len) for name in names}
        self._cache_config = make_family("cache_config_info", registry)
        self._adapters_info = make_family(ADAPTERS_INFO, registry)
        self._adapters: dict[int, AdapterStats] = {}
        updates = make_family("weight_updates", registry)
        self._weight_updates = {
            outcome: updates.labels(model_name, outcome) for outcome in BY_NAME["weight_updates"].values
        }
        self._weight_update_s = make_family("weight_update_seconds", registry).labels(model_name)
        rejections = make_family("admission_rejections", registry)
        self._rejections = {
            limit: rejections.labels(model_name, limit) for limit in BY_NAME["admission_rejections"].values
        }
        self._cores: dict[int, CoreMetrics] = {}
        self._cache_labels: dict[int, tuple[str, ...]] = {}
        for core in range(num_engines):
            self._core(core)

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        metrics = self._core(core)
        metrics.record_iteration(iteration)
        if scheduler is not None:
            metrics.record_scheduler(scheduler)
            if scheduler.adapters is not None and scheduler.adapters != self._adapters.get(core):
                self._adapters[core] = scheduler.adapters
                self._record_adapters(scheduler.adapters.limit)

    def core_ready(self, core: int, config: EngineConfig, num_blocks: int) -> None:
        self._core(core).record_ready()
        fields = [str(getattr(config.cache, field)) for field in CACHE_CONFIG_LABELS.values()]
        self._drop_cache_config(core)
        self._cache_labels[core] = (*fields, str(num_blocks), self._label(core))
        self._cache_config.labels(*self._cache_labels[core]).set(1)

    def core_died(self, core: int, num_resumed: int, num_failed: int) -> None:
        num_waiting = num_resumed if len(self._cores) == 1 else 0  # with other cores, they wait there
        self._core(core).record_death(num_resumed, num_failed, num_waiting)
        self._drop_cache_config(core)

    def rested(self, state: str) -> None:
        for core in self._cores.values():
            core.record_rest(state)

    def weights_updated(self, outcome: str, seconds: float) -> None:
        self._weight_updates[outcome].inc()
        if outcome == "finished":
            self._weight_update_s.observe(seconds)

    def refused(self, limit: str) -> None:
        self._rejections[limit].inc()

    def _record_adapters(self, limit: int) -> None:
        """Set the single series of all cores, replacing the previous labels."""
        self._adapters_info.clear()
        running = {name for one in self._adapters.values() for name in one.running}
        waiting = {name for one in self._adapters.values() for name in one.waiting}
        labels = str(limit), ",".join(sorted(running)), ",".join(sorted(waiting))
        self._adapters_info.labels(*labels).set(time.time())

    def _core(self, core: int) -> CoreMetrics:
        if core not in self._cores:
            self._cores[core] = CoreMetrics(self._families, self._model_name, self._label(core))
        return self._cores[core]

    def _label(self, core: int) -> str:
        return str(self._first_engine + core)

    def _drop_cache_config(self, core: int) -> None:
        """Remove the labels, since the next core may have another number of blocks."""
        if core in self._cache_labels:
            self._cache_config.remove(*self._cache_labels.pop(core))


class CoreMetrics:
    """Metrics of one core."""

    def __init__(self, families: dict[str, Any], model_name: str, engine: str) -> None:
        self._metrics: dict[str, Any] = {}
        self._by_value: dict[tuple[str, str], Any] = {}
        for name, family in families.items():
            if values := BY_NAME[name].values:
                children = {(name, value): family.labels(model_name, engine, value) for value in values}
                self._by_value.update(children)
            else:
                self._metrics[name] = family.labels(model_name, engine)
        self._last = SchedulerStats()

    def set(self, name: str, value: float) -> None:
        self._metrics[name].set(value)

    def record_iteration(self, iteration: IterationStats) -> None:
        num_computed = iteration.num_prompt_tokens - iteration.num_cached_tokens
        self._inc("generation_tokens", iteration.num_generation_tokens)
        if iteration.num_prompt_tokens:
            self._inc("prompt_tokens", iteration.num_prompt_tokens)
            self._inc("prompt_tokens_cached", iteration.num_cached_tokens)
            self._by_value["prompt_tokens_by_source", "local_compute"].inc(num_computed)
            num_local = iteration.num_cached_tokens - iteration.num_stored_tokens
            self._by_value["prompt_tokens_by_source", "local_cache_hit"].inc(num_local)
            self._by_value["prompt_tokens_by_source", "external_kv_transfer"].inc(iteration.num_stored_tokens)
        if num_computed + iteration.num_generation_tokens > 0:
            self._observe("iteration_tokens_total", num_computed + iteration.num_generation_tokens)
        for seconds in iteration.time_to_first_token_s:
            self._observe("time_to_first_token_seconds", seconds)
        self._metrics["inter_token_latency_seconds"].observe_all(iteration.inter_token_s)
        for sequence in iteration.finished:
            self._record_finished(sequence)
        for request in iteration.ended:
            self._record_ended(request)

    def record_scheduler(self, stats: SchedulerStats) -> None:
        """Set what has changed since the last step; totals of the scheduler become increments."""
        last, self._last = self._last, stats
        for name, field in GAUGES.items():
            value = getattr(stats, field)
            if value != getattr(last, field):
                self.set(name, value)
        if (stats.num_waiting, stats.num_held) != (last.num_waiting, last.num_held):
            self._set_waiting(stats.num_waiting, stats.num_held)
        for name in TOTALS:
            if increment := getattr(stats, name) - getattr(last, name):
                self._inc(name, increment)
        if stats.store is not None and stats.store != last.store:
            self._record_store(stats.store, last.store or StoreStats())
        if stats.encoder is not None and stats.encoder != last.encoder:
            self._record_encoder(stats.encoder, last.encoder or EncoderStats())
        if stats.transfer is not None and stats.transfer != last.transfer:
            for name, field in TRANSFER_GAUGES.items():
                self.set(name, getattr(stats.transfer, field))
            before = last.transfer or TransferStats()
            for name, field in TRANSFER_TOTALS.items():
                self._inc(name, getattr(stats.transfer, field) - getattr(before, field))
        if stats.spec_decoding is not None and stats.spec_decoding != last.spec_decoding:
            self._record_drafts(stats.spec_decoding, last.spec_decoding or SpecDecodingStats())

    def _record_store(self, stats: StoreStats, last: StoreStats) -> None:
        for name, field in STORE_GAUGES.items():
            self.set(name, getattr(stats, field))
        for name, field in STORE_TOTALS.items():
            self._inc(name, getattr(stats, field) - getattr(last, field))

    def _record_encoder(self, stats: EncoderStats, last: EncoderStats) -> None:
        self.set(ENCODER_USAGE, stats.num_bytes / stats.most_bytes)
        for name, field in ENCODER_TOTALS.items():
            self._inc(name, getattr(stats, field) - getattr(last, field))
        for kind, count in stats.num_items.items():
            self._by_value["request_media_items", kind].inc(count - last.num_items.get(kind, 0))

    def _record_drafts(self, stats: SpecDecodingStats, last: SpecDecodingStats) -> None:
        for name in DRAFT_TOTALS:
            self._inc(f"spec_decode_{name}", getattr(stats, name) - getattr(last, name))
        name, places = "spec_decode_num_accepted_tokens_per_pos", stats.num_accepted_tokens_per_pos
        before = [*last.num_accepted_tokens_per_pos, *[0] * len(places)]
        pairs = zip(places, before, strict=False)
        for position, (count, count_before) in zip(BY_NAME[name].values, pairs, strict=False):
            self._by_value[name, position].inc(count - count_before)

    def record_ready(self) -> None:
        self.set("engine_core_up", 1)
        self.record_rest("awake")

    def record_rest(self, state: str) -> None:
        """Set 1 for this state and 0 for the others."""
        for one in SLEEP_STATES:
            self._by_value["engine_sleep_state", one].set(one == state)

    def record_death(self, num_resumed: int, num_failed: int, num_waiting: int) -> None:
        """Reset the core's metrics, since the next one counts from zero; `num_waiting` requests wait for it."""
        self._last = SchedulerStats(num_waiting=num_waiting, num_held=num_waiting)
        self._inc("engine_core_deaths", 1)
        self._inc("engine_core_resumed_requests", num_resumed)
        self._inc("engine_core_failed_requests", num_failed)
        for name in ("engine_core_up", *GAUGES, *STORE_GAUGES, ENCODER_USAGE):
            self.set(name, 0)
        self._set_waiting(num_waiting, num_waiting)

    def _set_waiting(self, num_waiting: int, num_deferred: int) -> None:
        self.set("num_requests_waiting", num_waiting)
        self._by_value["num_requests_waiting_by_reason", "capacity"].set(num_waiting - num_deferred)
        self._by_value["num_requests_waiting_by_reason", "deferred"].set(num_deferred)

    def _record_finished(self, one: FinishedRequestStats) -> None:
        reason = one.finish_reason if one.finish_reason in FINISH_REASONS else "error"
        self._by_value["request_success", reason].inc()
        self._observe("e2e_request_latency_seconds", one.e2e_s)
        self._observe("request_queue_time_seconds", one.queue_s)
        self._observe("request_prefill_time_seconds", one.prefill_s)
        self._observe("request_decode_time_seconds", one.decode_s)
        self._observe("request_inference_time_seconds", one.prefill_s + one.decode_s)
        if one.num_generation_tokens > 1:
            mean_s = one.decode_s / (one.num_generation_tokens - 1)
            self._observe("request_time_per_output_token_seconds", mean_s)
        self._observe("request_generation_tokens", one.num_generation_tokens)
        self._observe("request_num_preemptions", one.num_preemptions)
        if one.max_tokens is not None:
            self._observe("request_params_max_tokens", one.max_tokens)
        if one.has_prompt:
            self._observe("request_prompt_tokens", one.num_prompt_tokens)
            self._observe("request_prefill_kv_computed_tokens", one.num_prompt_tokens - one.num_cached_tokens)

    def _record_ended(self, request: EndedRequest) -> None:
        self._observe("request_params_n", request.num_sequences)
        self._observe("request_max_num_generation_tokens", request.max_num_generation_tokens)

    def _inc(self, name: str, amount: float) -> None:
        self._metrics[name].inc(amount)

    def _observe(self, name: str, value: float) -> None:
        self._metrics[name].observe(value)
