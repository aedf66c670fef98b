"""Makes what a row of the table of metrics describes, in a registry; shows it under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from quire.metrics.buckets import token_buckets
from quire.metrics.catalog import BY_NAME, PREFIX, VLLM_NAMES

VLLM_PREFIX = "vllm:"


def make_family(name: str, registry: CollectorRegistry, max_model_len: int = 1) -> Any:
    """The metric of this name, registered.

    Args:
        max_model_len: bounds histograms of a request's tokens.
    """
    info = BY_NAME[name]
    args = (PREFIX + name, info.doc, info.labels)
    if info.kind == "histogram":
        return Histogram(*args, buckets=info.buckets or token_buckets(max_model_len), registry=registry)
    return (Gauge if info.kind == "gauge" else Counter)(*args, registry=registry)


class VllmNames:
    """A registry's metrics, those that vLLM has, too, under its names; the numbers are the registry's own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield _renamed(metric) if metric.name in VLLM_NAMES else metric


def _renamed(metric: Metric) -> Metric:
    renamed = Metric(_vllm(metric.name), metric.documentation, metric.type, metric.unit)
    renamed.samples = [sample._replace(name=_vllm(sample.name)) for sample in metric.samples]
    return renamed


def _vllm(name: str) -> str:
    return VLLM_PREFIX + name.removeprefix(PREFIX)
