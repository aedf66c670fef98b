# SPDX-License-Identifier: Apache-2.0
"""Metrics of an engine in this process as plain objects, for `LLM.get_metrics`, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import prometheus_client
from prometheus_client.samples import Sample

from quire.metrics.catalog import VllmNames

POSITION = "position"  # Label whose values are the indices of a `Vector`.


@dataclass(frozen=True)
class Metric:
    """Metric with its labels."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """Number that only grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by position."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """Number of the present."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """Distribution; `buckets` maps an upper bound, as text, to the number of values up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(registry: prometheus_client.CollectorRegistry) -> list[Metric]:
    """Return the metrics of a registry."""
    return [metric for family in VllmNames(registry).collect() for metric in _metrics(family)]


def _metrics(family: prometheus_client.Metric) -> Iterator[Metric]:
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            labels = {key: value for key, value in sample.labels.items() if key not in ("le", POSITION)}
            groups.setdefault(tuple(labels.items()), []).append(sample)
    for key, samples in groups.items():
        yield _metric(family, dict(key), samples)


def _metric(family: prometheus_client.Metric, labels: dict[str, str], samples: list[Sample]) -> Metric:
    if family.type == "histogram":
        by_kind = {sample.name.removeprefix(family.name): sample.value for sample in samples}
        buckets = {sample.labels["le"]: int(sample.value) for sample in samples if "le" in sample.labels}
        return Histogram(family.name, labels, int(by_kind["_count"]), by_kind["_sum"], buckets)
    if family.type == "gauge":
        return Gauge(family.name, labels, samples[0].value)
    if POSITION in samples[0].labels:
        ordered = sorted(samples, key=lambda sample: int(sample.labels[POSITION]))
        return Vector(family.name, labels, [int(sample.value) for sample in ordered])
    return Counter(family.name, labels, int(samples[0].value))
