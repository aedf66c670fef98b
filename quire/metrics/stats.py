"""What happened in one step, as the output processor saw it; loggers turn it into metrics or a log line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from quire.config import EngineConfig
from quire.plugins import FACTORY, PluginTable
from quire.scheduler.output import SchedulerStats


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


@dataclass(slots=True)
class IterationStats:
    """Events of one step; `time_to_first_token_s` has an entry per first token, `inter_token_s` per later one."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    finished: list[FinishedRequestStats] = field(default_factory=list)


class StatLogger(Protocol):
    """Receives every step's statistics; must be cheap. An error is logged and harms nobody else."""

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None) -> None: ...


STAT_LOGGERS: PluginTable[Callable[[EngineConfig], StatLogger]] = PluginTable(
    "quire.stat_loggers", "a stat logger", {}, FACTORY
)
"""What packages offer; every front end makes one of each."""
