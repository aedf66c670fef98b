# SPDX-License-Identifier: Apache-2.0
"""Outputs of the engine: `RequestOutput`, and `PoolingRequestOutput` with its subclasses, under vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from quire.vllm_names.imports import attributes_of


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
    """Tool call by the model; `arguments` is the text of a JSON object, `id` the model's own id."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class ChatAnswer:
    """Parsed text of a chat completion, as the server parses it."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


PositionLogprobs = dict[int, Logprob]
"""Token id -> Logprob at one position: the sampled token first, then the most likely or requested ones."""


@dataclass(slots=True)
class FlatLogprobs(Sequence[PositionLogprobs]):
    """Logprobs of many positions in a few long lists; as a sequence, a dict per position.

    Position i has the entries `start_indices[i]` to `end_indices[i]` of the other lists, and none if it has no
    logprobs (the first of a prompt). Thousands of dicts of objects would load the garbage collector.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)
    token_bytes: list[bytes | None] = field(default_factory=list)

    def append(self, position: PositionLogprobs | None) -> None:
        """Add a position; None has no entries."""
        self.start_indices.append(len(self.token_ids))
        for token_id, logprob in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(logprob.logprob)
            self.ranks.append(logprob.rank)
            self.decoded_tokens.append(logprob.decoded_token)
            self.token_bytes.append(logprob.token_bytes)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[PositionLogprobs | None]) -> None:
        """Add several positions."""
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | FlatLogprobs:
        if isinstance(index, slice):
            part = FlatLogprobs()
            part.extend(self[i] for i in range(*index.indices(len(self))))
            return part
        entries = slice(self.start_indices[index], self.end_indices[index])
        columns = (self.logprobs, self.ranks, self.decoded_tokens, self.token_bytes)
        rows = zip(*(column[entries] for column in columns), strict=True)
        return {i: Logprob(*row) for i, row in zip(self.token_ids[entries], rows, strict=True)}

    def __add__(self, other: Iterable[PositionLogprobs | None]) -> FlatLogprobs:
        joined = self[:]
        joined.extend(other)
        return joined


Positions = list[PositionLogprobs] | FlatLogprobs
PromptPositions = list[PositionLogprobs | None] | FlatLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    `finish_reason` is "stop", "length", "repetition", "abort", "timeout" or "error", None while running; `stop_reason`
    is the stop string or stop token id that matched, None for end-of-sequence, and the message of an "error", which is
    the request's own fault if `refused`. `answer` is the parsed text of `LLM.chat`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Positions | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    answer: ChatAnswer | None = None
    refused: bool = False

    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def was_cut(self) -> bool:
        """True if the text was ended by something other than the model: a limit, a stop string, a failure."""
        return self.finish_reason not in (None, "stop") or self.stop_reason is not None


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
    num_draft_tokens: int = 0  # Draft tokens that were verified.
    num_accepted_tokens: int = 0  # Accepted draft tokens.


def joined_stats(parts: Sequence[RequestStateStats]) -> RequestStateStats:
    """Merge timelines of parallel sequences: from the first start to the last end."""
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
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
    )


def _first(times: Iterable[float]) -> float:
    return min((time for time in times if time), default=0.0)


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of a beam search: prompt and generated tokens, and the text of both.

    `logprobs` are of the generated tokens, and `cum_logprob` is their sum.
    """

    orig_prompt: str | None
    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """Sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class RequestOutput:
    """State of one request: its prompt and one `CompletionOutput` for each of its `n` completions.

    Of its `num_cached_tokens` prompt tokens, `num_stored_tokens` were loaded from --kv-store or from another engine.
    `kv_transfer_params` are for the engine that continues the request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptPositions | None = None
    num_cached_tokens: int = 0
    metrics: RequestStateStats = field(default_factory=RequestStateStats)
    num_stored_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    def add(self, other: RequestOutput) -> None:
        """Append a later delta of the same request to this one."""
        self.finished |= other.finished
        self.metrics = other.metrics
        self.num_cached_tokens = max(self.num_cached_tokens, other.num_cached_tokens)
        self.num_stored_tokens = max(self.num_stored_tokens, other.num_stored_tokens)
        self.prompt_logprobs = self.prompt_logprobs or other.prompt_logprobs
        self.kv_transfer_params = self.kv_transfer_params or other.kv_transfer_params
        mine = {out.index: out for out in self.outputs}
        for new in other.outputs:
            if new.index in mine:
                _extend(mine[new.index], new)
            else:
                self.outputs.append(dataclasses.replace(new))


def _joined(mine: Positions, new: Positions) -> Positions:
    return mine + new if isinstance(mine, FlatLogprobs) else mine + list(new)


def _extend(mine: CompletionOutput, new: CompletionOutput) -> None:
    mine.text += new.text
    mine.token_ids = mine.token_ids + new.token_ids
    mine.cumulative_logprob = new.cumulative_logprob
    if new.logprobs is not None:
        mine.logprobs = new.logprobs if mine.logprobs is None else _joined(mine.logprobs, new.logprobs)
    mine.finish_reason, mine.stop_reason = new.finish_reason, new.stop_reason


if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__)  # vLLM's names that are elsewhere
