"""What happened in one step, as the front end saw it, and who is told: `StatLogger`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire.config import EngineConfig
from quire.outputs import RequestStateStats
from quire.plugins import FACTORY, PluginTable
from quire.sampling_params import SamplingParams
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
    is_fork: bool = False
    """Whether the prompt is another sequence's, too, which is finished on its own."""
    is_pooled: bool = False
    """Whether it has what was pooled of its prompt, in place of tokens."""

    @property
    def has_prompt(self) -> bool:
        """Whether its prompt was computed, on its account: all of it, but for what was cached."""
        return bool(self.num_generation_tokens or self.is_pooled) and not self.is_fork


@dataclass(slots=True)
class EndedRequest:
    """A caller's request, all of whose sequences have finished.

    `params` are those of its first sequence, `num_sequences` is its `n`; `times` are of all sequences together and
    `ended_ts` is on the same clock. `trace_headers` are what its caller gave.
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

    A prompt counts once, however many sequences go on from it, as in the `usage` of replies. `spent_in_vain` are, by
    tenant, prompt tokens that were computed for requests that ended before they had a token.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    finished: list[FinishedRequestStats] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)
    spent_in_vain: Mapping[str, int] = field(default_factory=dict)


class StatLogger(ABC):
    """Is told what an engine does, in the thread that does it; must be cheap.

    An error is logged and harms nobody else. `core` is the index of an engine core. Only `record` has to be there.
    """

    @abstractmethod
    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        """A step of a core; without `scheduler`, something that the front end ended itself."""

    def core_ready(self, core: int, config: EngineConfig, num_blocks: int) -> None:  # noqa: B027
        """A core has loaded, with so many KV cache blocks."""

    def core_died(self, core: int, num_resumed: int, num_failed: int) -> None:  # noqa: B027
        """A core is gone and will be replaced: so many of its requests go on in the new one, and so many ended."""

    def rested(self, state: str) -> None:  # noqa: B027
        """The cores fell asleep or woke: "awake", "weights_offloaded" or "discard_all"."""

    def refused(self, limit: str) -> None:  # noqa: B027
        """A request was refused: the queue was full or memory short; `limit` is the option that says so."""

    def close(self) -> None:  # noqa: B027
        """The engine has ended; may take a second or two."""


STAT_LOGGERS: PluginTable[Callable[[EngineConfig], StatLogger]] = PluginTable(
    "quire.stat_loggers", "a stat logger", {}, FACTORY
)
"""What packages offer; every front end makes one of each."""
