"""Makes what a row of the table of metrics describes, in a registry; shows it under vLLM's names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from quire.metrics.buckets import token_buckets
from quire.metrics.catalog import BY_NAME, PREFIX, VLLM_NAMES

PROBES = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
"""Routes whose requests are no work."""


def make_family(name: str, registry: CollectorRegistry, max_model_len: int = 1) -> Any:
    """The metric of this name, registered.

    Args:
        max_model_len: bounds histograms of a request's tokens.
    """
    info = BY_NAME[name]
    args = (PREFIX + name, info.doc, info.labels)
    if info.kind == "histogram":
        return Distribution(*args, buckets=info.buckets or token_buckets(max_model_len), registry=registry)
    return (Gauge if info.kind == "gauge" else Counter)(*args, registry=registry)


class Distribution(Histogram):
    """A histogram that is told of a whole step at once: its tokens come together, and most took equally long."""

    def observe_all(self, amounts: Iterable[float]) -> None:
        """`observe` each."""
        for amount, count in Tally(amounts).items():
            self._sum.inc(count * amount)
            self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class VllmNames:
    """A registry's metrics, those that vLLM has, too, under its names; the numbers are the registry's own.

    vLLM's of HTTP come from a middleware that leaves probes out and knows only the class of a status.
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
    """Those of requests that are no probes; statuses of one class are one sample."""
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
