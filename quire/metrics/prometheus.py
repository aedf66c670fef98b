"""`PrometheusStatLogger`: the engine's statistics as Prometheus metrics, with vLLM's names under `quire:`.

Invariant: labels come from closed sets, and every metric lives in the registry that was passed in, so several
engines (and tests) can live in one process.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.metrics import buckets
from quire.metrics.stats import FinishedRequestStats, IterationStats
from quire.scheduler.output import SchedulerStats

FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")


class PrometheusStatLogger:
    """Turns every step's statistics into metrics.

    Args:
        model_name: label of every metric.
        max_model_len: bounds the token histograms.
        registry: where the metrics are registered.
        engine: label that tells replicas apart.
    """

    def __init__(
        self, model_name: str, max_model_len: int, *, registry: CollectorRegistry, engine: str = "0"
    ) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": engine}
        self._last = SchedulerStats()
        self._make_gauges()
        self._make_counters()
        self._make_latencies()
        self._make_sizes(max_model_len)

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None) -> None:
        self._prompt_tokens.inc(iteration.num_prompt_tokens)
        self._cached_tokens.inc(iteration.num_cached_tokens)
        self._generation_tokens.inc(iteration.num_generation_tokens)
        num_tokens = (
            iteration.num_prompt_tokens - iteration.num_cached_tokens + iteration.num_generation_tokens
        )
        if num_tokens > 0:
            self._iteration_tokens.observe(num_tokens)
        for seconds in iteration.time_to_first_token_s:
            self._time_to_first_token.observe(seconds)
        for seconds in iteration.inter_token_s:
            self._inter_token.observe(seconds)
        for request in iteration.finished:
            self._record_finished(request)
        if scheduler is not None:
            self._record_scheduler(scheduler)

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_cache_usage)
        # The scheduler's counters are totals; a restarted core counts from zero again.
        self._preemptions.inc(max(0, stats.num_preemptions - self._last.num_preemptions))
        self._queries.inc(max(0, stats.prefix_cache_queries - self._last.prefix_cache_queries))
        self._hits.inc(max(0, stats.prefix_cache_hits - self._last.prefix_cache_hits))
        self._last = stats

    def _record_finished(self, request: FinishedRequestStats) -> None:
        reason = request.finish_reason if request.finish_reason in FINISH_REASONS else "error"
        self._success[reason].inc()
        self._e2e.observe(request.e2e_s)
        self._queue.observe(request.queue_s)
        self._prefill.observe(request.prefill_s)
        self._decode.observe(request.decode_s)
        self._inference.observe(request.prefill_s + request.decode_s)
        if request.num_generation_tokens > 1:
            self._per_token.observe(request.decode_s / (request.num_generation_tokens - 1))
        self._request_prompt_tokens.observe(request.num_prompt_tokens)
        self._request_generation_tokens.observe(request.num_generation_tokens)
        if request.max_tokens is not None:
            self._request_max_tokens.observe(request.max_tokens)

    def _make_gauges(self) -> None:
        self._running = self._make(Gauge, "num_requests_running", "Requests in the running batch.")
        self._waiting = self._make(Gauge, "num_requests_waiting", "Requests that wait to be scheduled.")
        self._kv_usage = self._make(
            Gauge, "kv_cache_usage_perc", "Share of KV cache blocks in use, 1 is all."
        )

    def _make_counters(self) -> None:
        self._preemptions = self._make(Counter, "num_preemptions", "Preemptions of running requests.")
        self._queries = self._make(Counter, "prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._hits = self._make(Counter, "prefix_cache_hits", "Tokens found in the prefix cache.")
        self._prompt_tokens = self._make(Counter, "prompt_tokens", "Prompt tokens processed.")
        self._cached_tokens = self._make(
            Counter, "prompt_tokens_cached", "Prompt tokens taken from the cache."
        )
        self._generation_tokens = self._make(Counter, "generation_tokens", "Tokens generated.")
        success = Counter(
            "quire:request_success",
            "Requests that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._success = {
            reason: success.labels(**self._labels, finished_reason=reason) for reason in FINISH_REASONS
        }

    def _make_latencies(self) -> None:
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", buckets.TTFT_S
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens.", buckets.TOKEN_S
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean over a request's later tokens.", buckets.TOKEN_S
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", buckets.REQUEST_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Waiting to be scheduled.", buckets.REQUEST_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From scheduling to the first token.", buckets.REQUEST_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", buckets.REQUEST_S
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From scheduling to the end.", buckets.REQUEST_S
        )

    def _make_sizes(self, max_model_len: int) -> None:
        sizes = buckets.token_buckets(max_model_len)
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens.", sizes)
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens.", sizes
        )
        self._request_max_tokens = self._histogram(
            "request_params_max_tokens", "Requested max_tokens.", sizes
        )
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in one step.", buckets.ITERATION_TOKENS
        )

    def _make(self, kind: Any, name: str, documentation: str, **options: Any) -> Any:
        metric = kind(f"quire:{name}", documentation, list(self._labels), registry=self._registry, **options)
        return metric.labels(**self._labels)

    def _histogram(self, name: str, documentation: str, bounds: Any) -> Any:
        return self._make(Histogram, name, documentation, buckets=bounds)
