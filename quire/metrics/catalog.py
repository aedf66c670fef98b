# SPDX-License-Identifier: Apache-2.0
"""Table of metrics: names, kinds, labels and meanings; construction of the metrics, also under vLLM's names.

Invariant: every metric of the server has a row, and the values of every label come from its row. So no client can make
`/metrics` grow, and docs/observability.md, which a test compares with the table, is complete. Histogram buckets are
vLLM's, so that its dashboards work.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from quire.config.cache import CacheConfig
from quire.media import KINDS

ADAPTERS_INFO = "lora_requests_info"
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
HTTP_S = (0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 20.0, 60.0, 300.0)
PARAMS_N = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50, 100)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def token_buckets(max_model_len: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50 ... up to `max_model_len`."""
    steps = (mantissa * 10**exponent for exponent in itertools.count() for mantissa in (1, 2, 5))
    return list(itertools.takewhile(lambda step: step <= max(max_model_len, 1), steps))


PREFIX = "quire:"
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
WEIGHT_UPDATE_ENDS = ("finished", "failed", "aborted")
ENGINE = ("model_name", "engine")  # Labels of per-core metrics; `engine` is the index of the core.
FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")
CACHE_CONFIG_LABELS = {
    "cache_dtype" if field.name == "kv_cache_dtype" else field.name: field.name
    for field in dataclasses.fields(CacheConfig)
}  # Label -> field of CacheConfig.


@dataclass(frozen=True)
class MetricInfo:
    """Definition of one metric.

    `values` are those of the last label, if they exist from the start; `buckets` None: 1, 2, 5, 10 ... up
    to the context length. `vllm` is vLLM's prefix for the same metric, None if it has no such metric.
    """

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    doc: str
    labels: tuple[str, ...] = ENGINE
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None
    vllm: str | None = "vllm:"


METRICS = (
    MetricInfo("gauge", "num_requests_running", "Sequences in the running batch."),
    MetricInfo("gauge", "num_requests_waiting", "Sequences that wait to be scheduled."),
    MetricInfo(
        "gauge",
        "num_requests_waiting_by_reason",
        "Waiting sequences: for a place in the batch (capacity), or for something else first (deferred).",
        (*ENGINE, "reason"),
        ("capacity", "deferred"),
    ),
    MetricInfo("gauge", "kv_cache_usage_perc", "Fraction of KV cache blocks in use, 1 is all."),
    MetricInfo(
        "gauge",
        "cache_config_info",
        "1, with the configuration of the KV cache in its labels.",
        (*CACHE_CONFIG_LABELS, "num_gpu_blocks", "engine"),
    ),
    MetricInfo(
        "gauge",
        "engine_sleep_state",
        "1 for the core's sleep state; weights_offloaded is sleep at level 1, wherever the weights are.",
        (*ENGINE, "sleep_state"),
        SLEEP_STATES,
    ),
    MetricInfo(
        "counter",
        "weight_updates",
        "Weight updates by their end; the old weights stay unless it is finished (docs/training.md).",
        ("model_name", "outcome"),
        WEIGHT_UPDATE_ENDS,
        vllm=None,
    ),
    MetricInfo(
        "histogram",
        "weight_update_seconds",
        "From the last message of a weight update until the new weights are in use.",
        ("model_name",),
        buckets=HTTP_S,
        vllm=None,
    ),
    MetricInfo(
        "gauge",
        ADAPTERS_INFO,
        "Unix time of the last change; labels: adapters of running and waiting sequences, separated by commas.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    MetricInfo("counter", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
    MetricInfo("counter", "prefix_cache_hits", "Tokens found in the prefix cache."),
    MetricInfo("counter", "num_preemptions", "Preemptions of running sequences."),
    MetricInfo("counter", "prompt_tokens", "Prompt tokens, each prompt once, when it has its first token."),
    MetricInfo(
        "counter",
        "prompt_tokens_by_source",
        "Of these, computed (local_compute), found in the prefix cache (local_cache_hit) or in a store "
        "(external_kv_transfer).",
        (*ENGINE, "source"),
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    MetricInfo("counter", "prompt_tokens_cached", "Of these, found in the prefix cache."),
    MetricInfo("counter", "generation_tokens", "Tokens generated."),
    MetricInfo(
        "counter",
        "request_success",
        "Sequences that ended, by reason; `timeout` is quire's own.",
        (*ENGINE, "finished_reason"),
        FINISH_REASONS,
    ),
    MetricInfo("counter", "spec_decode_num_drafts", "Drafts verified."),
    MetricInfo("counter", "spec_decode_num_draft_tokens", "Draft tokens verified."),
    MetricInfo("counter", "spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    MetricInfo(
        "counter",
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted by position in the draft, from 0 to 63.",
        (*ENGINE, "position"),
        tuple(map(str, range(64))),
    ),
    MetricInfo(
        "counter",
        "admission_rejections",
        "Requests refused because the queue was full or memory short, by the option of the limit.",
        ("model_name", "reason"),
        ("max_num_queued_reqs", "max_num_queued_tokens", "min_free_memory"),
    ),
    MetricInfo("histogram", "request_prompt_tokens", "Tokens of a prompt, each prompt once."),
    MetricInfo("histogram", "request_generation_tokens", "Tokens generated by a sequence."),
    MetricInfo("histogram", "request_max_num_generation_tokens", "Of a request, by its longest sequence."),
    MetricInfo("histogram", "request_params_max_tokens", "`max_tokens` of a sequence, as far as it fits."),
    MetricInfo(
        "histogram",
        "request_prefill_kv_computed_tokens",
        "Tokens of a prompt that were not in the prefix cache, each prompt once.",
    ),
    MetricInfo("histogram", "request_params_n", "`n` of a request.", buckets=PARAMS_N),
    MetricInfo("histogram", "request_num_preemptions", "Preemptions of a sequence.", buckets=PREEMPTIONS),
    MetricInfo(
        "histogram",
        "iteration_tokens_total",
        "Tokens computed in a plan, of all its decode steps.",
        buckets=ITERATION_TOKENS,
    ),
    MetricInfo(
        "histogram",
        "time_to_first_token_seconds",
        "From a sequence's arrival to its first token.",
        buckets=TTFT_S,
    ),
    MetricInfo(
        "histogram",
        "inter_token_latency_seconds",
        "Between two tokens of a sequence; tokens of one plan share the time since the last plan equally.",
        buckets=TOKEN_S,
    ),
    MetricInfo(
        "histogram",
        "request_time_per_output_token_seconds",
        "Mean over a sequence's tokens after the first.",
        buckets=TOKEN_S,
    ),
    MetricInfo(
        "histogram", "e2e_request_latency_seconds", "From a sequence's arrival to its end.", buckets=REQUEST_S
    ),
    MetricInfo(
        "histogram",
        "request_queue_time_seconds",
        "From a sequence's arrival until it is scheduled.",
        buckets=REQUEST_S,
    ),
    MetricInfo(
        "histogram", "request_prefill_time_seconds", "From there to its first token.", buckets=REQUEST_S
    ),
    MetricInfo(
        "histogram", "request_decode_time_seconds", "From its first token to the end.", buckets=REQUEST_S
    ),
    MetricInfo("histogram", "request_inference_time_seconds", "The two together.", buckets=REQUEST_S),
    MetricInfo("gauge", "engine_core_up", "1 while the core is up and has loaded.", vllm=None),
    MetricInfo(
        "counter", "engine_core_deaths", "Deaths of the core that were followed by a new one.", vllm=None
    ),
    MetricInfo("counter", "engine_core_resumed_requests", "Requests resumed in a new core.", vllm=None),
    MetricInfo(
        "counter", "engine_core_failed_requests", "Requests that ended with the death of a core.", vllm=None
    ),
    MetricInfo("counter", "num_swaps", "Preemptions that copied the blocks to the host.", vllm=None),
    MetricInfo(
        "gauge", "host_cache_usage_perc", "Fraction of host blocks held by swapped sequences.", vllm=None
    ),
    MetricInfo(
        "gauge",
        "saturation",
        "Load from 0 to 1: 0.8 is a full batch, 1 a queue that refuses requests (see scaling.md).",
        vllm=None,
    ),
    MetricInfo(
        "gauge", "estimated_queue_seconds", "Seconds that a new request would wait for its start.", vllm=None
    ),
    MetricInfo("gauge", "kv_store_blocks", "Blocks in --kv-store.", vllm=None),
    MetricInfo("gauge", "kv_store_bytes", "Bytes that they take.", vllm=None),
    MetricInfo("gauge", "kv_store_resting", "1 while the store is left alone after a failure.", vllm=None),
    MetricInfo("counter", "kv_store_loaded_blocks", "Blocks loaded from the store.", vllm=None),
    MetricInfo("counter", "kv_store_saved_blocks", "Blocks saved in the store.", vllm=None),
    MetricInfo("counter", "kv_store_unsaved_blocks", "Computed blocks that were not saved.", vllm=None),
    MetricInfo(
        "counter", "kv_store_failed_loads", "Blocks whose load failed; they were computed.", vllm=None
    ),
    MetricInfo("counter", "kv_store_corrupt_blocks", "Stored blocks that were damaged.", vllm=None),
    MetricInfo("counter", "kv_store_evicted_blocks", "Blocks evicted from the store.", vllm=None),
    MetricInfo("counter", "kv_store_timeouts", "Requests that stopped waiting for the store.", vllm=None),
    MetricInfo(
        "counter", "kv_store_reloads", "Preempted requests that loaded their prefix again.", vllm=None
    ),
    MetricInfo("counter", "kv_transfer_offers", "Requests whose blocks were offered to a peer.", vllm=None),
    MetricInfo("counter", "kv_transfer_offered_blocks", "Blocks that were kept for a peer.", vllm=None),
    MetricInfo(
        "counter", "kv_transfer_unoffered_blocks", "Blocks that were to be kept and were not.", vllm=None
    ),
    MetricInfo("counter", "kv_transfer_pulls", "Requests whose blocks were to be pulled.", vllm=None),
    MetricInfo(
        "counter", "kv_transfer_failed_pulls", "Of these, computed in part or whole after all.", vllm=None
    ),
    MetricInfo("counter", "kv_transfer_pulled_blocks", "Blocks loaded from a peer.", vllm=None),
    MetricInfo("gauge", "kv_transfer_leases", "Leases under which blocks are kept for peers.", vllm=None),
    MetricInfo("gauge", "kv_transfer_oldest_lease_seconds", "Age of the oldest of them.", vllm=None),
    MetricInfo(
        "gauge", "encoder_cache_usage_perc", "Fraction of --encoder-cache-gb in use, 1 is all.", vllm=None
    ),
    MetricInfo(
        "counter", "encoder_cache_hits", "Images and other media whose embeddings were there.", vllm=None
    ),
    MetricInfo("counter", "encoder_cache_misses", "Media that had to be encoded.", vllm=None),
    MetricInfo("counter", "encoder_seconds", "Seconds of encoding, in slices between steps.", vllm=None),
    MetricInfo("counter", "encoder_failures", "Media that could not be encoded.", vllm=None),
    MetricInfo(
        "counter",
        "request_media_items",
        "Media of sequences that came, by kind; the same content twice in a sequence counts once.",
        (*ENGINE, "kind"),
        KINDS,
        vllm=None,
    ),
    MetricInfo(
        "counter",
        "http_requests",
        "HTTP requests; 499: the client went away before an answer began.",
        ("method", "handler", "status"),
        vllm="",
    ),
    MetricInfo(
        "histogram",
        "http_request_duration_seconds",
        "From the request's head to the end of the answer.",
        ("method", "handler"),
        buckets=HTTP_S,
        vllm="",
    ),
    MetricInfo(
        "counter",
        "http_client_disconnects",
        "Clients that went away before their answer was complete, which ends its work.",
        (),
        vllm=None,
    ),
    MetricInfo(
        "gauge",
        "router_model_state",
        "1 for the state of a model (`quire serve --models`).",
        ("model_name", "state"),
        vllm=None,
    ),
    MetricInfo(
        "gauge",
        "router_requests_waiting",
        "Requests that wait until their model is in memory.",
        ("model_name",),
        vllm=None,
    ),
    MetricInfo(
        "gauge", "router_requests_running", "Requests at a model's server.", ("model_name",), vllm=None
    ),
    MetricInfo(
        "gauge",
        "router_model_memory_bytes",
        "Estimated memory of a model, 0 unless it is loaded.",
        ("model_name",),
        vllm=None,
    ),
    MetricInfo("gauge", "router_memory_limit_bytes", "Memory for all models together.", (), vllm=None),
    MetricInfo(
        "counter",
        "router_loads",
        "Models loaded; failed: loads that failed, and servers that died.",
        ("model_name", "outcome"),
        vllm=None,
    ),
    MetricInfo(
        "counter",
        "router_evictions",
        "Models unloaded, or put to sleep to make room.",
        ("model_name", "kind"),
        vllm=None,
    ),
    MetricInfo(
        "counter",
        "router_refusals",
        "Requests refused before they reached a model's server, by status.",
        ("model_name", "status"),
        vllm=None,
    ),
    MetricInfo(
        "histogram",
        "router_wait_seconds",
        "From a request's arrival until its model is in memory.",
        ("model_name",),
        buckets=HTTP_S,
        vllm=None,
    ),
    MetricInfo(
        "counter", "log_lines_lost", "Lines of this process's log that could not be written.", (), vllm=None
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}
VLLM_NAMES = {
    PREFIX + metric.name: metric.vllm + metric.name for metric in METRICS if metric.vllm is not None
}  # quire's name -> vLLM's.


def metrics_table() -> str:
    """Return the table of docs/observability.md."""
    rows = [
        f"| {_shown(metric)} | {metric.kind} | {_labels(metric)} | {metric.doc} |\n" for metric in METRICS
    ]
    return "| metric | kind | labels | meaning |\n|---|---|---|---|\n" + "".join(rows).replace("|  |", "| |")


def _shown(metric: MetricInfo) -> str:
    """Return the Prometheus name, with a mark for metrics without a vLLM counterpart."""
    ending = "_total" if metric.kind == "counter" else ""
    return f"`{PREFIX}{metric.name}{ending}`{' *' if metric.vllm is None else ''}"


def _labels(metric: MetricInfo) -> str:
    if metric.name == "cache_config_info":
        return "the fields of the configuration, engine"
    return ", ".join(metric.labels).replace("model_name, engine", "m, e")


# Routes whose requests are no work.
PROBES = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})


def make_family(name: str, registry: CollectorRegistry, max_model_len: int = 1) -> Any:
    """Create and register the metric of this name.

    Args:
        max_model_len: bounds histograms of a request's tokens.
    """
    info = BY_NAME[name]
    args = (PREFIX + name, info.doc, info.labels)
    if info.kind == "histogram":
        return Distribution(*args, buckets=info.buckets or token_buckets(max_model_len), registry=registry)
    return (Gauge if info.kind == "gauge" else Counter)(*args, registry=registry)


class Distribution(Histogram):
    """Histogram that observes a whole step at once: its tokens come together, and most took equally long."""

    def observe_all(self, amounts: Iterable[float]) -> None:
        """Observe each amount."""
        for amount, count in Tally(amounts).items():
            self._sum.inc(count * amount)
            self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class VllmNames:
    """Collector that shows a registry's metrics under vLLM's names where those exist.

    vLLM's HTTP metrics come from a middleware that omits probes and has only the class of a status.
    """

    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield _renamed(metric, VLLM_NAMES[metric.name]) if metric.name in VLLM_NAMES else metric


def _renamed(metric: Metric, name: str) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type, metric.unit)
    samples = [
        sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in metric.samples
    ]
    renamed.samples = samples if name.startswith("vllm:") else list(_by_class(samples))
    return renamed


def _by_class(samples: list[Sample]) -> Iterator[Sample]:
    """Merge samples of one status class, without those of probes."""
    classes: dict[Any, Sample] = {}
    for sample in samples:
        labels = dict(sample.labels)
        if labels["handler"] in PROBES:
            continue
        if "status" in labels:
            labels["status"] = f"{labels['status'][0]}xx"
        key = sample.name, *labels.items()
        one = classes.get(key)
        if one is None:
            classes[key] = sample._replace(labels=labels)
        else:
            value = (
                min(one.value, sample.value) if one.name.endswith("_created") else one.value + sample.value
            )
            classes[key] = one._replace(value=value)
    yield from classes.values()
