"""The metrics of several processes as those of one server.

Invariant: a series is there once. Counters and histograms add up, and so do gauges of HTTP (`quire:http_...`), which
each process has for itself. All other gauges are of the engine, whose statistics only the first process is told: its
word counts, as it does for what happens once and all of them see (`SEEN_BY_ALL`). When a counter began (`_created`) is
when the first of them began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Family = Sequence[Any]
"""Name, documentation, type, and samples, each a name, labels and a value."""
ADDED_TYPES = ("counter", "histogram", "summary", "gaugehistogram")
ADDED_GAUGES = "quire:http_"
SEEN_BY_ALL = ("quire:engine_core_deaths",)


def families_of(registry: Collector) -> list[Any]:
    """All that is in a registry, in data that can be sent to another process."""
    return [
        [
            one.name,
            one.documentation,
            one.type,
            [[sample.name, sample.labels, sample.value] for sample in one.samples],
        ]
        for one in registry.collect()
    ]


class Merged(Collector):
    """What several processes have measured, the first process first, for `generate_latest`."""

    def __init__(self, answers: Iterable[Sequence[Family]]) -> None:
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
    """How a value of one process and that of another make one."""
    if sample.endswith("_created"):
        return min
    if (kind in ADDED_TYPES and name not in SEEN_BY_ALL) or (
        kind == "gauge" and name.startswith(ADDED_GAUGES)
    ):
        return lambda one, other: one + other
    return lambda first, _: first
