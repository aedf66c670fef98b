# SPDX-License-Identifier: Apache-2.0
"""Data exchanged between scheduler and worker, once per step: `SchedulerOutput` down, `ModelRunnerOutput` up.

Invariant: everything here is small, frozen, msgspec-serializable data; the scheduler and the worker import this module
and nothing else of each other. `STEP_PROTOCOL_VERSION` changes with any field.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from quire.adapters import AdapterRequest
from quire.kv_transfer_params import KVOffer
from quire.media import MediaItem
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduler.feature_stats import (
    AdapterStats,
    EncoderStats,
    SpecDecodingStats,
    StoreStats,
    TransferStats,
)

STEP_PROTOCOL_VERSION = 14

BlockIds = list[list[int]]  # Block ids of one request: one list per KV cache group.


class NewRequestData(msgspec.Struct, frozen=True, gc=False):
    """Request for which the worker has no row: new, or resumed after a preemption.

    `token_ids` are all known tokens: `num_prompt_tokens` prompt tokens, then those generated before a preemption.
    `block_ids` are all its blocks, and the first `num_computed_tokens` tokens are in the cache already. The worker has
    loaded the adapter of `adapter_request`; running requests use at most `max_adapters` different ones. A request with
    `pooling_params` samples nothing, whatever `sampling_params` say, and gets its pooled prompt. Tokens from
    `second_text_start` on belong to a second text (token type 1); the first `instruction_length` tokens are computed
    but not pooled. `owner` is (tenant, cache salt): its generated text may speed up other requests of the same owner
    only. The worker has the embeddings of all its `media`.
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
    adapter_request: AdapterRequest | None = None
    media: list[MediaItem] = []


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """Work of one step for one request.

    It computes `num_tokens` tokens from position `start`, the position reached once all earlier plans have run. The
    last of them are `draft_token_ids`, which follow the known tokens. A token is sampled after each of the last
    `num_samples` tokens: 0, or 1 + the number of drafts.

    Nothing is sampled for a request with `pooling_params`. Its chunk that reaches the end of the prompt has `pools`
    set; that step returns its pooled output and finishes it.

    `new_block_ids` were added since the last plan with this request; the blocks of a new row are in `NewRequestData`.
    Tokens that the worker sampled itself are in its row and not repeated here, so a plan may include one that the
    scheduler has not received yet.
    """

    request_id: str
    start: int
    num_tokens: int
    num_samples: int
    new_block_ids: BlockIds
    draft_token_ids: list[int] = []
    pools: bool = False


class BranchedRow(msgspec.Struct, frozen=True, gc=False):
    """Next beam of a search in a row that the worker has: the tokens of `parent_id`'s row, the last of them replaced.

    Both rows are of one search and have equally many tokens. `block_ids` are all blocks of the row in place of those
    that it has; none if it continues itself. The next samples report `num_logprobs` most likely tokens.
    """

    request_id: str
    parent_id: str
    token_id: int
    block_ids: BlockIds
    num_logprobs: int


class SchedulerOutput(msgspec.Struct, frozen=True):
    """Plan of one step.

    Each request occurs at most once in `scheduled`, and every request of `new_requests` is among them. Rows of
    `removed_request_ids` (finished, aborted or preempted since the last step) are freed before rows are added.

    Drafts are verified by sampling: after each token the worker samples as if all tokens before it were certain. A
    draft is accepted if it and all earlier drafts equal the tokens sampled in their places. A request gets the
    accepted drafts and the token sampled after them, and is not planned again until the scheduler has received their
    number. Accepted drafts count as computed, rejected ones as never computed. With recurrent states
    (`KVCacheConfig.rolls_back` is false) no draft counts: the step keeps the state of the last non-draft token, and
    accepted drafts are computed again.

    `branches` change rows of searches, all at once and before rows are added; a row is planned with its step in
    `scheduled`. None of these rows has a sample in flight.

    With `max_decode_steps` above 1 (multi-step decode) every request computes its last token only and has blocks for
    `max_decode_steps` tokens. The worker may feed each sampled token back and sample the next, for all requests alike,
    and stop early. A request gets the tokens of all decode steps; all but the last of them count as computed.

    Before the forward pass whole blocks are copied, (source, target), in every layer: first `swap_outs` from the
    device to the host, then `swap_ins` from the host to the device, then `block_copies` on the device. Within
    a list the targets are distinct and no source is a target, so its order does not matter.

    Plans are executed in the order of their step ids, and may be made and submitted before earlier ones have returned.
    Hence a request that finished or failed in an earlier step may still be planned. Its row exists until the plan that
    removes it, and its results are dropped.
    """

    step_id: int
    new_requests: list[NewRequestData]
    scheduled: list[ScheduledRequest]
    removed_request_ids: list[str]
    swap_outs: list[tuple[int, int]] = []
    swap_ins: list[tuple[int, int]] = []
    block_copies: list[tuple[int, int]] = []
    max_decode_steps: int = msgspec.field(default=1, name="max_rounds")
    branches: list[BranchedRow] = []
    version: int = STEP_PROTOCOL_VERSION

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do; an empty plan is not executed and gets no result."""
        moves = self.swap_outs or self.swap_ins or self.block_copies
        return not (self.scheduled or self.removed_request_ids or moves)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Request id -> tokens to compute, in plan order."""
        return {request.request_id: request.num_tokens for request in self.scheduled}

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum([request.num_tokens for request in self.scheduled])


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one position: the sampled token first, then the most likely in order; `rank` is the sampled token's.

    With `ranks`, the tokens after the sampled one were requested by id, and `ranks` are their ranks.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    ranks: list[int] | None = None


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """Pooled output of a prompt: float32, little-endian, C order; shape [size] or [tokens, size]."""

    shape: list[int]
    data: bytes

    @staticmethod
    def from_array(values: ArrayLike) -> Pooled:
        array = np.ascontiguousarray(values, dtype="<f4")
        return Pooled(list(array.shape), array.tobytes())

    def array(self) -> NDArray[np.float32]:
        """Return a read-only view of the values."""
        return np.frombuffer(self.data, dtype="<f4").reshape(self.shape)


class ModelRunnerOutput(msgspec.Struct, frozen=True):
    """Result of one step, keyed by request id.

    `sampled_token_ids` has an entry for every request that sampled: its accepted drafts and the token after them, or
    one token per decode step. `logprobs` has one entry for each of these tokens. `prompt_logprobs` has the positions
    whose logits this step computed: entry i of a chunk starting at c is about prompt token c + i + 1. `pooled` has the
    output of each request whose chunk pools. `failed` maps a request, which has no other entry then, to the reason
    (for example non-finite logits). `draft_token_ids` are proposals for a later plan to verify.
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
    version: int = STEP_PROTOCOL_VERSION

    def num_accepted(self, request_id: str) -> int:
        """Return the number of accepted drafts; 0 for a request that sampled nothing."""
        return max(len(self.sampled_token_ids.get(request_id, ())) - 1, 0)


class RequestUpdate(msgspec.Struct, omit_defaults=True, gc=False):
    """Update of one request after a step, for the front end.

    `finish_reason` is None while the request runs; once set, no further update of this request follows. `pooled` comes
    with the last update of a request with pooling parameters. `error` is the reason for the finish reason "error";
    `refused` means that the request itself is at fault. The `*_ts` fields are monotonic seconds and are set on the
    first update and on the last.
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
    num_draft_tokens: int = 0  # Draft tokens that the step verified.
    num_accepted_tokens: int = 0  # Accepted draft tokens among the new tokens.
    num_stored_tokens: int = 0  # Cached tokens that were loaded from a store; comes with `num_cached_tokens`.
    kv_offer: KVOffer | None = None  # Blocks kept for another engine; in the last update.


class SchedulerStats(msgspec.Struct, omit_defaults=True):
    """State of the scheduler after a step; counters are totals since start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_swaps: int = 0  # Preemptions that copied the request's blocks to the host.
    host_cache_usage: float = 0.0  # Fraction of the host blocks that swapped requests hold.
    num_held: int = 0  # Waiting requests that are held by something else than a place in the batch.
    spec_decoding: SpecDecodingStats | None = None  # None: there were no drafts.
    adapters: AdapterStats | None = None  # None: adapters are disabled.
    store: StoreStats | None = None  # None: there is no --kv-store.
    encoder: EncoderStats | None = None  # None: no request had an image.
    transfer: TransferStats | None = None  # None: there is no --kv-transfer-config.
    saturation: float = 0.0  # From 0 to 1 (`quire.scheduler.load_signals`).
    queue_s: float = 0.0  # Seconds that a new request would wait for its start.
