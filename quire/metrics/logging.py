"""`LoggingStatLogger`: one line now and then about what the engine does.

Invariant: `record` only adds numbers up; the owner calls `log` at its interval, and an idle engine stays silent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire.metrics.stats import IterationStats
from quire.scheduler.output import SchedulerStats

logger = logging.getLogger(__name__)


class LoggingStatLogger:
    """Throughput since the last line, and the state of the queue and the KV cache.

    Args:
        clock: monotonic seconds; a test brings its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._scheduler = SchedulerStats()
        self._logged = SchedulerStats()

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None) -> None:
        self._num_prompt_tokens += iteration.num_prompt_tokens - iteration.num_cached_tokens
        self._num_generation_tokens += iteration.num_generation_tokens
        if scheduler is not None:
            self._scheduler = scheduler

    def log(self) -> None:
        """Write the line, unless nothing happened since the last one and nothing is going on."""
        now, state = self._clock(), self._scheduler
        elapsed, self._since = max(now - self._since, 1e-9), now
        prompt_rate, generation_rate = (
            self._num_prompt_tokens / elapsed,
            self._num_generation_tokens / elapsed,
        )
        self._num_prompt_tokens = self._num_generation_tokens = 0
        if not (prompt_rate or generation_rate or state.num_running or state.num_waiting):
            return
        logger.info(
            "prompt throughput %.1f tok/s, generation throughput %.1f tok/s, running %d, waiting %d, "
            "KV cache usage %.1f %%, prefix cache hit rate %s",
            prompt_rate,
            generation_rate,
            state.num_running,
            state.num_waiting,
            100 * state.kv_cache_usage,
            self._hit_rate(),
        )
        self._logged = state

    def _hit_rate(self) -> str:
        """Of the lookups since the last line."""
        queries = self._scheduler.prefix_cache_queries - self._logged.prefix_cache_queries
        hits = self._scheduler.prefix_cache_hits - self._logged.prefix_cache_hits
        return f"{100 * hits / queries:.1f} %" if queries > 0 else "-"
