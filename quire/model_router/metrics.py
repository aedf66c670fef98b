# SPDX-License-Identifier: Apache-2.0
"""Metrics of the router; those of a model's own server are at `/metrics?model=NAME`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from quire.metrics.catalog import BY_NAME, PREFIX, make_family
from quire.model_router.planner import ModelPhase, RouterPlanner

MODEL = ("model_name",)


class RouterMetrics:
    """Counters of the router, and gauges that are read from the planner when they are shown."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._loads = make_family("router_loads", registry)
        self._evictions = make_family("router_evictions", registry)
        self._refusals = make_family("router_refusals", registry)
        self._waits = make_family("router_wait_seconds", registry)

    def watch(self, planner: RouterPlanner) -> None:
        """Show a planner's states."""
        self._registry.register(_States(planner))

    def admitted(self, model: str, wait_s: float) -> None:
        self._waits.labels(model).observe(wait_s)

    def refused(self, model: str, status: int) -> None:
        self._refusals.labels(model, str(status)).inc()

    def loaded(self, model: str) -> None:
        self._loads.labels(model, "loaded").inc()

    def failed(self, model: str) -> None:
        self._loads.labels(model, "failed").inc()

    def evicted(self, model: str, kind: str) -> None:
        self._evictions.labels(model, kind).inc()


class _States(Collector):
    """Gauges of a planner's states."""

    def __init__(self, planner: RouterPlanner) -> None:
        self._planner = planner

    def collect(self) -> Iterator[GaugeMetricFamily]:
        states = self._planner.models.values()
        status = _gauge("router_model_state", (*MODEL, "state"))
        waiting, running = _gauge("router_requests_waiting", MODEL), _gauge("router_requests_running", MODEL)
        memory = _gauge("router_model_memory_bytes", MODEL)
        for state in states:
            for one in ModelPhase:
                status.add_metric([state.name, one.value], float(state.status is one))
            waiting.add_metric([state.name], len(state.waiting))
            running.add_metric([state.name], len(state.running))
            memory.add_metric([state.name], state.charged_bytes)
        limit = _gauge("router_memory_limit_bytes", ())
        limit.add_metric([], self._planner.limits.memory_bytes)
        yield from (status, waiting, running, memory, limit)


def _gauge(name: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, BY_NAME[name].doc, labels=labels)
