# SPDX-License-Identifier: Apache-2.0
"""GET /metrics: metrics of all API processes, merged.

Invariant: each series appears once. Counters, histograms and HTTP gauges (`quire:http_...`) are summed. Other gauges
describe the engine, and the first process's value counts, as for events that all processes count (`SEEN_BY_ALL`).
`_created` is the earliest of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.state import ServerState, server_of
from quire.metrics.catalog import VllmNames

router = APIRouter()
QUERY = "metrics"


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics of the server's processes in Prometheus's text format."""
    server = server_of(request)
    alone = server.siblings is None
    source = server.registry if alone else MergedMetrics(await server.ask_all(QUERY))
    shown = VllmNames(source) if server.config.metrics_compat == "vllm" else source
    return Response(generate_latest(shown), media_type=CONTENT_TYPE_LATEST)


async def measured(server: ServerState) -> list[Any]:
    """Return this process's metrics."""
    return families_of(server.registry)


MetricFamily = Sequence[Any]  # Name, documentation, type, and samples: [name, labels, value] each.
ADDED_TYPES = ("counter", "histogram", "summary", "gaugehistogram")
ADDED_GAUGES = "quire:http_"
SEEN_BY_ALL = ("quire:engine_core_deaths",)


def families_of(registry: Collector) -> list[Any]:
    """Return the content of a registry as plain data that can be sent to another process."""
    return [
        [
            one.name,
            one.documentation,
            one.type,
            [[sample.name, sample.labels, sample.value] for sample in one.samples],
        ]
        for one in registry.collect()
    ]


class MergedMetrics(Collector):
    """Collector of several processes' metrics, the first process's first, for `generate_latest`."""

    def __init__(self, answers: Iterable[Sequence[MetricFamily]]) -> None:
        self._families: dict[str, Metric] = {}
        self._values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for answer in answers:
            for family in answer:
                self._add(*family)

    def collect(self) -> Iterator[Metric]:
        for name, family in self._families.items():
            merged = Metric(name, family.documentation, family.type)
            for (sample, labels), value in self._values[name].items():
                merged.add_sample(sample, dict(labels), value)
            yield merged

    def _add(self, name: str, documentation: str, kind: str, samples: Iterable[Sequence[Any]]) -> None:
        self._families.setdefault(name, Metric(name, documentation, kind))
        values = self._values.setdefault(name, {})
        for sample, labels, value in samples:
            series = sample, tuple(labels.items())
            join = _join_of(name, kind, sample)
            values[series] = join(values[series], value) if series in values else value


def _join_of(name: str, kind: str, sample: str) -> Callable[[float, float], float]:
    """Return the function that merges the values of two processes."""
    if sample.endswith("_created"):
        return min
    if (kind in ADDED_TYPES and name not in SEEN_BY_ALL) or (
        kind == "gauge" and name.startswith(ADDED_GAUGES)
    ):
        return lambda one, other: one + other
    return lambda first, _: first
