"""What the engine gives back: `RequestOutput` and its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position; `rank` is 1 for the most likely token.

    `token_bytes` is what the token adds to the text there; `decoded_token` is the same as text, with U+FFFD where it
    begins or ends inside a character.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = None


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; `arguments` is the text of a JSON object, `id` what the model called it."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Answer:
    """What the text of a chat's answer says: the same that the server would tell apart."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


PositionLogprobs = dict[int, Logprob]
"""Token id -> Logprob at one position: the chosen token first, then the most likely ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    `finish_reason` is "stop", "length", "abort", "timeout" or "error", None while running; `stop_reason` is the
    stop string or stop token id that matched, None for end-of-sequence, and what went wrong after an "error".
    `answer` is what `LLM.chat` reads in the text.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    answer: Answer | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStateStats:
    """Timeline of one request; times are seconds on the engine's monotonic clock, 0.0 until they happened."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0


def joined_stats(parts: Sequence[RequestStateStats]) -> RequestStateStats:
    """One timeline of several that run side by side: from the first to start to the last to end."""
    if len(parts) == 1:
        return parts[0]
    return RequestStateStats(
        arrival_time=_first(part.arrival_time for part in parts),
        queued_ts=_first(part.queued_ts for part in parts),
        scheduled_ts=_first(part.scheduled_ts for part in parts),
        first_token_ts=_first(part.first_token_ts for part in parts),
        last_token_ts=max(part.last_token_ts for part in parts),
        num_generation_tokens=sum(part.num_generation_tokens for part in parts),
        num_preemptions=sum(part.num_preemptions for part in parts),
    )


def _first(times: Iterable[float]) -> float:
    return min((time for time in times if time), default=0.0)


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: its prompt and one `CompletionOutput` for each of its `n` completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestStateStats = field(default_factory=RequestStateStats)

    def add(self, other: RequestOutput) -> None:
        """Append a later delta of the same request to this one."""
        self.finished |= other.finished
        self.metrics = other.metrics
        self.num_cached_tokens = max(self.num_cached_tokens, other.num_cached_tokens)
        self.prompt_logprobs = self.prompt_logprobs or other.prompt_logprobs
        mine = {out.index: out for out in self.outputs}
        for new in other.outputs:
            if new.index in mine:
                _extend(mine[new.index], new)
            else:
                self.outputs.append(dataclasses.replace(new))


def _extend(mine: CompletionOutput, new: CompletionOutput) -> None:
    mine.text += new.text
    mine.token_ids = mine.token_ids + new.token_ids
    mine.cumulative_logprob = new.cumulative_logprob
    if new.logprobs is not None:
        mine.logprobs = (mine.logprobs or []) + new.logprobs
    mine.finish_reason, mine.stop_reason = new.finish_reason, new.stop_reason
