"""The narrow waist: one `SchedulerOutput` goes down and one `ModelRunnerOutput` comes up, once per step.

Invariant: everything here is small, frozen data that msgspec can write and read; the scheduler's side and
the worker's side import this module and nothing else of each other. `WAIST_VERSION` changes with any field.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

WAIST_VERSION = 11

BlockIds = list[list[int]]
"""Block ids of one request: one list per KV cache group."""


class NewRequestData(msgspec.Struct, frozen=True, gc=False):
    """A request the worker has no row for: never seen, or resumed after a preemption.

    `token_ids` are all known tokens, `num_prompt_tokens` of them from the prompt (the rest was generated
    before a preemption); `block_ids` are all its blocks; `num_computed_tokens` tokens are in the cache already.
    The worker has the adapter of its `lora_request`. Running requests have at most `max_loras` different ones.
    One with `pooling_params` samples nothing, whatever `sampling_params` say, and gets what is pooled of its prompt;
    tokens from `second_text_start` on are of a second text (token type 1), and the first `instruction_length` are read
    and not pooled.
    `owner` is its tenant and its cache salt: what it generates may help others of the same owner only.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: BlockIds
    num_computed_tokens: int
    eos_token_ids: list[int] = []
    pooling_params: PoolingParams | None = None
    second_text_start: int | None = None
    instruction_length: int | None = None
    owner: tuple[str, str | None] = ("", None)
    lora_request: LoRARequest | None = None


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """What a step does for a request that has a row, or gets one with the same plan.

    It computes `num_tokens` tokens, from position `start` on, which are so many as are computed once all earlier plans
    have been executed. The last of them are `draft_token_ids`: guesses, which stand behind the tokens that the request
    has. Behind each of the last `num_samples` tokens one is sampled: 0, or 1 + the number of drafts.

    Nothing is sampled for a request that has `pooling_params`. Of its chunks the one that reaches the end of the prompt
    `pools`: with that step the request gets its numbers, and ends.

    `new_block_ids` were added since the last plan that had the request; those of a new row are in `NewRequestData`.
    Tokens that the worker sampled itself are in its row and not repeated here, so a plan may count on one that the
    scheduler has not seen yet.
    """

    request_id: str
    start: int
    num_tokens: int
    num_samples: int
    new_block_ids: BlockIds
    draft_token_ids: list[int] = []
    pools: bool = False


class SchedulerOutput(msgspec.Struct, frozen=True):
    """The plan of one step.

    Each request is at most once in `scheduled`, and those of `new_requests` are among them; rows of
    `removed_request_ids` (finished, aborted or preempted since the last step) are freed before rows are added.

    Drafts are verified by sampling: behind each token the worker samples what it would sample were all tokens before it
    known, so a draft is right, and accepted, if it and those before it are what was sampled in their places. A request
    gets the accepted drafts and the token sampled behind them, and is not planned again until the scheduler has heard
    how many these are. Accepted drafts count as computed, and the others as if they had never been there. Only where a
    layer keeps a state (`KVCacheConfig.rolls_back` is false) no draft counts: there a step leaves the state behind the
    last token that was no draft, and those accepted are computed again.

    With `max_rounds` above 1 every request computes its one last token and has blocks for so many. The worker may go on
    by itself: it computes the token that it has sampled, and samples the next, for all requests alike, and ends when it
    likes. A request gets what all rounds sampled, and all but the last of these tokens count as computed.

    Before the forward pass whole blocks are copied, (source, target), in every layer: first `swap_outs` from the
    device to the host, then `swap_ins` from the host to the device, then `block_copies` on the device. Within
    a list the targets are distinct and no source is a target, so its order does not matter.

    Plans are executed in the order of their step ids, and a plan may be made and handed over before earlier ones
    have come back. Hence a request that ended or failed in an earlier step may still be planned; its row is there
    until the plan that removes it, and whatever is reported for it is dropped.
    """

    step_id: int
    new_requests: list[NewRequestData]
    scheduled: list[ScheduledRequest]
    removed_request_ids: list[str]
    swap_outs: list[tuple[int, int]] = []
    swap_ins: list[tuple[int, int]] = []
    block_copies: list[tuple[int, int]] = []
    max_rounds: int = 1
    version: int = WAIST_VERSION

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do; such a plan is not executed and gets no result."""
        moves = self.swap_outs or self.swap_ins or self.block_copies
        return not (self.scheduled or self.removed_request_ids or moves)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Request id -> tokens to compute, in the plan's order."""
        return {request.request_id: request.num_tokens for request in self.scheduled}

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum([request.num_tokens for request in self.scheduled])


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one position: the chosen token first, then the most likely in order; `rank` is the chosen one's.

    With `ranks`, those behind the chosen one are tokens that were asked for, and these are their ranks.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    ranks: list[int] | None = None


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """What was pooled of a prompt: float32 numbers, little-endian, in C order; [size], or [tokens, size]."""

    shape: list[int]
    data: bytes

    @staticmethod
    def of(values: ArrayLike) -> Pooled:
        array = np.ascontiguousarray(values, dtype="<f4")
        return Pooled(list(array.shape), array.tobytes())

    def array(self) -> NDArray[np.float32]:
        """The numbers, not to be written to."""
        return np.frombuffer(self.data, dtype="<f4").reshape(self.shape)


class ModelRunnerOutput(msgspec.Struct, frozen=True):
    """The result of one step, keyed by request id.

    `sampled_token_ids` holds an entry for every request that sampled: its accepted drafts, if any, and the token behind
    them, or a token of each round; `logprobs` has one entry for each of these. `prompt_logprobs` holds the positions
    whose logits this step computed: entry i of a chunk starting at c is about prompt token c + i + 1. `pooled` has the
    numbers of each request whose chunk pools. `failed` maps a request, which has no entry elsewhere then, to the reason
    it cannot go on (for example non-finite logits). `draft_token_ids` are guesses of what follows a request's tokens,
    for a later plan to verify.
    """

    step_id: int
    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    failed: dict[str, str] = {}
    draft_token_ids: dict[str, list[int]] = {}
    forward_s: float = 0.0
    sample_s: float = 0.0
    pooled: dict[str, Pooled] = {}
    version: int = WAIST_VERSION

    def num_accepted(self, request_id: str) -> int:
        """How many of a request's drafts were right, if it had some; 0 for one that sampled nothing."""
        return max(len(self.sampled_token_ids.get(request_id, ())) - 1, 0)


class SpecDecodingStats(msgspec.Struct, omit_defaults=True):
    """What became of drafts; totals since start."""

    num_drafts: int = 0
    """Times that some tokens were guessed behind a request's last one, and verified."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    """How often the first token of a draft was accepted, the second ..."""

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """A draft of so many tokens was verified."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        per_position = self.num_accepted_tokens_per_pos
        per_position.extend([0] * (num_accepted - len(per_position)))
        for place in range(num_accepted):
            per_position[place] += 1

    def copy(self) -> SpecDecodingStats:
        """As it is now."""
        per_position = list(self.num_accepted_tokens_per_pos)
        return msgspec.structs.replace(self, num_accepted_tokens_per_pos=per_position)


class RequestUpdate(msgspec.Struct, omit_defaults=True, gc=False):
    """What one step meant for one request, as the front end sees it.

    `finish_reason` is None while the request runs; when set, no further update of this request follows.
    `pooled` comes with the end of a request that has pooling parameters. `error` says why it ended with "error", and
    `refused` that this is the request's fault.
    The `*_ts` fields are monotonic seconds and are set on the first update and on the last.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    num_preemptions: int = 0
    error: str | None = None
    refused: bool = False
    pooled: Pooled | None = None
    num_draft_tokens: int = 0
    """Guessed tokens that the step verified."""
    num_accepted_tokens: int = 0
    """Those of them that are among the new tokens."""


class AdapterStats(msgspec.Struct, frozen=True):
    """Names of the adapters of running requests and of those that wait, sorted; most that may run at a time."""

    running: list[str]
    waiting: list[str]
    max_loras: int


class SchedulerStats(msgspec.Struct, omit_defaults=True):
    """State of the scheduler after a step; counters are totals since start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_swaps: int = 0
    """Of the preemptions, those that copied the request's blocks to the host."""
    host_cache_usage: float = 0.0
    """Share of the host blocks that swapped requests hold."""
    num_held: int = 0
    """Of the waiting requests, those that lack something else than a place in the batch."""
    spec_decoding: SpecDecodingStats | None = None
    """None: there were no drafts."""
    adapters: AdapterStats | None = None
    """None: none are served."""
