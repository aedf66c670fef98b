"""How much of the log was lost, as a metric."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily

from quire.logging_setup import num_lost_lines
from quire.metrics.catalog import BY_NAME, PREFIX


class LostLines:
    """Asks, whenever the metrics are read, how many lines of this process's log could not be written."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        info = BY_NAME["log_lines_lost"]
        yield CounterMetricFamily(PREFIX + info.name, info.doc, value=num_lost_lines())
