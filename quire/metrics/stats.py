# SPDX-License-Identifier: Apache-2.0
"""Statistics of one step as seen by the front end, and the `StatLogger`s that receive them.

Invariant of `StatLoggerGroup`: an error of one logger is logged once and affects no other. A logger added later is
notified of the cores that are ready.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from quire.config import EngineConfig
from quire.outputs import RequestStateStats
from quire.plugins import FACTORY, PluginTable
from quire.sampling_params import SamplingParams
from quire.scheduler.output import SchedulerStats

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FinishedRequestStats:
    """Totals of one finished sequence; all times in seconds."""

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    max_tokens: int | None
    e2e_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    tenant: str = ""
    is_fork: bool = False  # The prompt is shared with another sequence, which is finished on its own.
    is_pooled: bool = False  # It has a pooled prompt in place of tokens.

    @property
    def has_prompt(self) -> bool:
        """True if its prompt was computed on its account, except for the cached part."""
        return bool(self.num_generation_tokens or self.is_pooled) and not self.is_fork


@dataclass(slots=True)
class EndedRequest:
    """Caller's request, all of whose sequences have finished.

    `params` are those of its first sequence, `num_sequences` is its `n`; `times` are of all sequences together and
    `ended_ts` is on the same clock. `trace_headers` are the caller's.
    """

    label: str
    params: SamplingParams
    num_sequences: int
    finish_reasons: list[str]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    max_num_generation_tokens: int
    times: RequestStateStats
    ended_ts: float
    trace_headers: Mapping[str, str]


@dataclass(slots=True)
class IterationStats:
    """Events of one step; `time_to_first_token_s` has an entry per first token, `inter_token_s` per later one.

    A prompt counts once, however many sequences continue it, as in the `usage` of replies. `wasted_prompt_tokens`: per
    tenant, prompt tokens computed for requests that ended before their first token.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    finished: list[FinishedRequestStats] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)
    wasted_prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    num_stored_tokens: int = 0


class StatLogger(ABC):
    """Receiver of engine statistics, called in the engine's thread; must be cheap.

    An error is logged and affects nothing else. `core` is the index of an engine core. Only `record` is required.
    """

    @abstractmethod
    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        """Record a step of a core; without `scheduler`, events of the front end alone."""

    def core_ready(self, core: int, config: EngineConfig, num_blocks: int) -> None:  # noqa: B027
        """Record that a core has loaded, with `num_blocks` KV cache blocks."""

    def core_died(self, core: int, num_resumed: int, num_failed: int) -> None:  # noqa: B027
        """Record that a core died and is replaced; of its requests `num_resumed` resume and `num_failed` ended."""

    def rested(self, state: str) -> None:  # noqa: B027
        """Record a change of the sleep state: "awake", "weights_offloaded" or "discard_all"."""

    def weights_updated(self, outcome: str, seconds: float) -> None:  # noqa: B027
        """Record the end of a weight update: "finished", "failed" or "aborted", and the seconds from its last message
        until the new weights were in use.
        """

    def refused(self, limit: str) -> None:  # noqa: B027
        """Record a refused request (full queue or short memory); `limit` is the option."""

    def close(self) -> None:  # noqa: B027
        """Close at the engine's end; may take a second or two."""


STAT_LOGGERS: PluginTable[Callable[[EngineConfig], StatLogger]] = PluginTable(
    "quire.stat_loggers", "a stat logger", {}, FACTORY
)  # Plug-ins; every front end makes one of each.


class StatLoggerGroup(StatLogger):
    """Group that notifies each member, in the order in which they were added."""

    def __init__(self, members: Iterable[StatLogger] = ()) -> None:
        self.members = list(members)
        self._failing: list[StatLogger] = []
        self._ready: dict[int, tuple[EngineConfig, int]] = {}

    def add(self, member: StatLogger) -> None:
        self.members.append(member)
        self._notify(member, self._repeat_ready)

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        self._notify_all(lambda one: one.record(iteration, scheduler, core))

    def core_ready(self, core: int, config: EngineConfig, num_blocks: int) -> None:
        self._ready[core] = config, num_blocks
        self._notify_all(lambda one: one.core_ready(core, config, num_blocks))

    def core_died(self, core: int, num_resumed: int, num_failed: int) -> None:
        self._ready.pop(core, None)
        self._notify_all(lambda one: one.core_died(core, num_resumed, num_failed))

    def rested(self, state: str) -> None:
        self._notify_all(lambda one: one.rested(state))

    def weights_updated(self, outcome: str, seconds: float) -> None:
        self._notify_all(lambda one: one.weights_updated(outcome, seconds))

    def refused(self, limit: str) -> None:
        self._notify_all(lambda one: one.refused(limit))

    def close(self) -> None:
        self._notify_all(lambda one: one.close())

    def _repeat_ready(self, member: StatLogger) -> None:
        for core, (config, num_blocks) in self._ready.items():
            member.core_ready(core, config, num_blocks)

    def _notify_all(self, notify: Callable[[StatLogger], None]) -> None:
        for member in self.members:
            self._notify(member, notify)

    def _notify(self, member: StatLogger, notify: Callable[[StatLogger], None]) -> None:
        try:
            notify(member)
        except Exception:
            if member not in self._failing:  # each step would log again
                self._failing.append(member)
                logger.exception("statistics could not be recorded by %r", member)
