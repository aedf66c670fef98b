# SPDX-License-Identifier: Apache-2.0
"""Periodic log line of engine statistics, and the metric of lost log lines.

Invariant: `record` only sums up numbers of all cores; the owner calls `log` at its interval, and an idle engine stays
silent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily

from quire.logging_setup import num_lost_lines
from quire.metrics.catalog import BY_NAME, PREFIX
from quire.metrics.stats import IterationStats, StatLogger
from quire.scheduler.output import SchedulerStats

logger = logging.getLogger(__name__)


class LostLinesCollector:
    """Collector of the number of log lines of this process that could not be written."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        info = BY_NAME["log_lines_lost"]
        yield CounterMetricFamily(PREFIX + info.name, info.doc, value=num_lost_lines())


class LoggingStatLogger(StatLogger):
    """Throughput since the last line, and the state of the queue and the KV cache.

    Args:
        clock: monotonic seconds, injected by tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._states: dict[int, SchedulerStats] = {}
        self._logged: dict[int, SchedulerStats] = {}

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        self._num_prompt_tokens += iteration.num_prompt_tokens - iteration.num_cached_tokens
        self._num_generation_tokens += iteration.num_generation_tokens
        if scheduler is not None:
            self._states[core] = scheduler

    def core_died(self, core: int, num_resumed: int, num_failed: int) -> None:
        """Reset the core's counters, which the next one starts from zero."""
        self._states.pop(core, None)
        self._logged.pop(core, None)

    def log(self) -> None:
        """Write the line, unless the engine was idle since the last one and still is."""
        now, states = self._clock(), self._states.values()
        elapsed, self._since = max(now - self._since, 1e-9), now
        prompt_rate = self._num_prompt_tokens / elapsed
        generation_rate = self._num_generation_tokens / elapsed
        self._num_prompt_tokens = self._num_generation_tokens = 0
        num_running, num_waiting = sum(s.num_running for s in states), sum(s.num_waiting for s in states)
        if not (prompt_rate or generation_rate or num_running or num_waiting):
            return
        logger.info(
            "prompt throughput %.1f tok/s, generation throughput %.1f tok/s, running %d, waiting %d, "
            "KV cache usage %.1f %%, prefix cache hit rate %s%s%s",
            prompt_rate,
            generation_rate,
            num_running,
            num_waiting,
            100 * sum(s.kv_cache_usage for s in states) / max(len(states), 1),
            self._hit_rate(),
            self._drafts(),
            self._adapters(),
        )
        self._logged = dict(self._states)

    def _hit_rate(self) -> str:
        """Return the hit rate since the last line."""
        queries, hits = _lookups(self._states.values())
        queries_before, hits_before = _lookups(self._logged.values())
        queries, hits = queries - queries_before, hits - hits_before
        return f"{100 * hits / queries:.1f} %" if queries > 0 else "-"

    def _drafts(self) -> str:
        """Return the acceptance of drafts since the last line, if there were any."""
        now, before = _drafted(self._states.values()), _drafted(self._logged.values())
        count, tokens, accepted = (total - earlier for total, earlier in zip(now, before, strict=True))
        if count <= 0:
            return ""
        length = 1 + accepted / count
        return f", drafts accepted {100 * accepted / tokens:.1f} % of {tokens}, mean accepted length {length:.2f}"

    def _adapters(self) -> str:
        """Return the number of adapters running and waiting, if any."""
        known = [state.adapters for state in self._states.values() if state.adapters is not None]
        running = {name for one in known for name in one.running}
        waiting = {name for one in known for name in one.waiting}
        return f", adapters running {len(running)}, waiting {len(waiting)}" if running or waiting else ""


def _drafted(states: Iterable[SchedulerStats]) -> tuple[int, int, int]:
    """Return the totals of verified drafts, their tokens, and accepted tokens."""
    known = [s.spec_decoding for s in states if s.spec_decoding is not None]
    return (
        sum(one.num_drafts for one in known),
        sum(one.num_draft_tokens for one in known),
        sum(one.num_accepted_tokens for one in known),
    )


def _lookups(states: Iterable[SchedulerStats]) -> tuple[int, int]:
    """Return the totals of tokens looked up in the prefix cache, and found."""
    states = list(states)
    return sum(s.prefix_cache_queries for s in states), sum(s.prefix_cache_hits for s in states)
