"""`LoggingStatLogger`: one line now and then about what the engine does.

Invariant: `record` only adds numbers up, of all cores; the owner calls `log` at its interval, and an idle engine stays
silent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from quire.metrics.stats import IterationStats, StatLogger
from quire.scheduler.output import SchedulerStats

logger = logging.getLogger(__name__)


class LoggingStatLogger(StatLogger):
    """Throughput since the last line, and the state of the queue and the KV cache.

    Args:
        clock: monotonic seconds; a test brings its own.
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
        """The next one counts from zero."""
        self._states.pop(core, None)
        self._logged.pop(core, None)

    def log(self) -> None:
        """Write the line, unless nothing happened since the last one and nothing is going on."""
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
        """Of the lookups since the last line."""
        queries, hits = _lookups(self._states.values())
        queries_before, hits_before = _lookups(self._logged.values())
        queries, hits = queries - queries_before, hits - hits_before
        return f"{100 * hits / queries:.1f} %" if queries > 0 else "-"

    def _drafts(self) -> str:
        """What became of drafts since the last line, if there were any."""
        now, before = _drafted(self._states.values()), _drafted(self._logged.values())
        count, tokens, accepted = (total - earlier for total, earlier in zip(now, before, strict=True))
        if count <= 0:
            return ""
        length = 1 + accepted / count
        return f", drafts accepted {100 * accepted / tokens:.1f} % of {tokens}, mean accepted length {length:.2f}"

    def _adapters(self) -> str:
        """Of the requests that run and wait now, if any have one."""
        known = [state.adapters for state in self._states.values() if state.adapters is not None]
        running = {name for one in known for name in one.running}
        waiting = {name for one in known for name in one.waiting}
        return f", adapters running {len(running)}, waiting {len(waiting)}" if running or waiting else ""


def _drafted(states: Iterable[SchedulerStats]) -> tuple[int, int, int]:
    """Drafts that were verified, their tokens, and those that were accepted."""
    known = [s.spec_decoding for s in states if s.spec_decoding is not None]
    return (
        sum(one.num_drafts for one in known),
        sum(one.num_draft_tokens for one in known),
        sum(one.num_accepted_tokens for one in known),
    )


def _lookups(states: Iterable[SchedulerStats]) -> tuple[int, int]:
    """Tokens that were looked up in the prefix cache, and those that were found."""
    states = list(states)
    return sum(s.prefix_cache_queries for s in states), sum(s.prefix_cache_hits for s in states)
