# SPDX-License-Identifier: Apache-2.0
"""State of one generation or pooling request in the scheduler.

Invariant: `status` moves along the edges of `_EDGES` only, and a finished request never changes again.
`num_computed_tokens` counts tokens whose keys and values are in the cache or will be after the steps in flight. A
draft counts once it is accepted; a request with drafts in flight is not planned again before that.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from quire.adapters import AdapterRequest
from quire.kv_cache.hashing import BlockHash, extra_keys
from quire.media import MediaItem
from quire.pooling_params import PoolingParams
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.scheduler.beams import Beams
from quire.scheduler.explain import WaitLog

Rank = tuple[float, int]  # Order of service, lower first: (policy's rank, arrival number).


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Never scheduled; holds no blocks and no row."""
    RUNNING = enum.auto()
    """Holds blocks and a row of the worker's batch."""
    PREEMPTED = enum.auto()
    """Waiting again: lost its blocks and its row, kept its tokens."""
    FINISHED = enum.auto()  # Final; has a finish reason.


_EDGES = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set[RequestStatus](),
}


class Request:
    """State of one request; the constructor's keywords are the fields of the core's add message.

    Attributes:
        prompt_token_ids: the given list, shared by the forks of a prompt; never changed.
        pooling_params: set for pooling; the request then finishes with its prompt and samples nothing.
        second_text_start: position of the second of two texts in the prompt.
        instruction_length: leading prompt tokens that are computed and not pooled.
        token_ids: all known tokens, `num_prompt_tokens` of the prompt and then the generated ones.
        num_computed_tokens: computed tokens; the scheduler lets this catch up with `num_tokens`.
        num_placeholder_tokens: tokens that steps in flight sample; they follow `token_ids` and can be planned.
        draft_token_ids: drafts that follow `token_ids`, to be verified.
        num_drafts_in_flight: drafts that a step in flight verifies.
        num_steps_in_flight: steps with a chunk of this request that have not come back.
        num_cached_tokens: tokens found in the prefix cache when the request first ran.
        block_hashes: hashes of the first full blocks, for the KV cache manager.
        adapter_request: its adapter.
        media: items whose embeddings fill positions of the prompt.
        parent: request whose computed tokens it shares, while that may save work (`quire.scheduler.scheduler`).
        search: parameters of its beam search.
        beams: rows of the search; `token_ids` are those of its likeliest beam.
        num_overtaken: requests with adapters that started while it waited for an adapter slot.
        num_short_steps: consecutive steps without room for its next chunk, which has a least size (`quire.media`).
        num_prompt_logprobs: prompt positions whose logprobs were reported already.
        queued_ts, scheduled_ts: monotonic seconds; 0.0 until it happened.
        number, rank: the order of arrival, set by the scheduler, and of service, set by its policy.
        has_row: whether the worker has a row of it, or gets one by a plan in flight; false while it runs only after
            `RequestQueues.renew_rows`.
        starts_over: whether it must be computed from its first token without interruption and without cached prefixes,
            because its pooling needs every token's hidden state. Set by the scheduler.
        wait: waiting time by cause.
    """

    # Slots keep access fast: 30 attributes exceed CPython's shared-key instance layout.
    __slots__ = (
        "_status",
        "adapter_request",
        "arrival_time",
        "beams",
        "block_hashes",
        "draft_token_ids",
        "eos_token_ids",
        "extra_keys",
        "finish_reason",
        "fork_of",
        "has_row",
        "instruction_length",
        "media",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts_in_flight",
        "num_overtaken",
        "num_placeholder_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_short_steps",
        "num_steps_in_flight",
        "number",
        "parent",
        "pooling_params",
        "priority",
        "prompt_token_ids",
        "queued_ts",
        "rank",
        "reported",
        "request_id",
        "sampling_params",
        "scheduled_ts",
        "search",
        "second_text_start",
        "starts_over",
        "tenant",
        "token_ids",
        "wait",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        arrival_time: float = 0.0,
        eos_token_ids: Sequence[int] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
        fork_of: str | None = None,
        output_token_ids: Sequence[int] = (),
        pooling_params: PoolingParams | None = None,
        search: BeamSearchParams | None = None,
        second_text_start: int | None = None,
        instruction_length: int | None = None,
        adapter_request: AdapterRequest | None = None,
        media: Sequence[MediaItem] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.token_ids = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.second_text_start = second_text_start
        self.instruction_length = instruction_length
        self.arrival_time = arrival_time
        self.eos_token_ids = list(eos_token_ids)
        self.priority = priority
        self.tenant = tenant
        self.fork_of = fork_of
        self.search = search
        self.beams = None if search is None else Beams(request_id, search, eos_token_ids)
        self.parent: Request | None = None
        self.has_row = False
        self.starts_over = False
        self.adapter_request = adapter_request
        self.media = list(media)
        adapter = None if adapter_request is None else adapter_request.cache_key
        self.extra_keys = extra_keys(cache_salt, adapter, self.media)
        self.block_hashes: list[BlockHash] = []
        self.num_computed_tokens = 0
        self.num_placeholder_tokens = 0
        self.draft_token_ids: list[int] = []
        self.num_drafts_in_flight = 0
        self.num_steps_in_flight = 0
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0
        self.num_preemptions = 0
        self.num_overtaken = 0
        self.num_short_steps = 0
        self.queued_ts = 0.0
        self.scheduled_ts = 0.0
        self.number = 0
        self.rank: Rank = (0.0, 0)
        self.wait = WaitLog()
        self.reported = False
        self.finish_reason: str | None = None
        self._status = RequestStatus.WAITING

    def __repr__(self) -> str:
        progress = f"{self.num_computed_tokens}/{self.num_tokens} computed"
        return f"Request({self.request_id!r}, {self.status.name}, {progress})"

    @property
    def status(self) -> RequestStatus:
        return self._status

    @property
    def is_finished(self) -> bool:
        return self._status is RequestStatus.FINISHED

    @property
    def cache_salt(self) -> str | None:
        return self.extra_keys.cache_salt

    @property
    def adapter(self) -> str | None:
        """Key of the adapter; None without one."""
        return None if self.adapter_request is None else self.adapter_request.key

    @property
    def reads_prefix_cache(self) -> bool:
        """False if it computes every token: prompt logprobs need every position, and it may ask for that itself."""
        params = self.sampling_params
        return not (
            self.starts_over or params.skip_reading_prefix_cache or params.prompt_logprobs is not None
        )

    @property
    def recomputes(self) -> bool:
        """True if a new row of it needs every token to be computed again, so that its blocks are of no use."""
        is_branched = self.beams is not None and self.beams.has_begun
        return self.starts_over or is_branched or self.sampling_params.has_sampler_state

    @property
    def num_rows(self) -> int:
        """Rows of the worker's batch that it takes."""
        return 1 if self.beams is None else self.beams.width

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def max_computed_tokens(self, max_model_len: int) -> int:
        """Return the most tokens to compute, given the model's limit.

        For a pooled prompt that is all of it. The last token that a request may generate is never computed, because
        nothing is sampled from it.
        """
        if self.pooling_params is not None:
            return self.num_prompt_tokens
        if self.sampling_params.max_tokens is None:
            return max_model_len - 1
        return min(self.num_prompt_tokens + self.sampling_params.max_tokens, max_model_len) - 1

    def num_missing_tokens(self, max_model_len: int) -> int:
        """Return the tokens to compute next: no drafts, at most one token that a step in flight has yet to sample.

        In a search that is one token of each beam, and the beams are known only after a step.
        """
        if self.num_placeholder_tokens == 0:  # a decoding request lacks its last token
            return len(self.token_ids) - self.num_computed_tokens
        if self.num_drafts_in_flight or self.beams is not None:  # the position of its next token is unknown
            return 0
        num_to_compute = self.max_computed_tokens(max_model_len)
        return min(self.num_tokens + self.num_placeholder_tokens, num_to_compute) - self.num_computed_tokens

    def next_drafts(self, max_num_drafts: int, max_model_len: int) -> list[int]:
        """Return the drafts to verify in the step that computes the request's last token, which may itself be in
        flight.

        Invariant: the token sampled after the last draft is still within the request's limits.
        """
        first = self.num_placeholder_tokens
        num_known = self.num_tokens + first
        room = min(max_num_drafts, self.max_computed_tokens(max_model_len) - num_known)
        return self.draft_token_ids[first : first + max(room, 0)]

    def advance(self, num_tokens: int, num_drafts: int = 0) -> int:
        """Plan the next tokens, and drafts after the last one; returns the number of tokens to sample."""
        self.num_computed_tokens += num_tokens
        self.num_steps_in_flight += 1
        self.num_short_steps = 0
        is_short = self.num_computed_tokens < len(self.token_ids) + self.num_placeholder_tokens
        if is_short or self.pooling_params is not None:
            assert num_drafts == 0, f"drafts for {self!r}, which samples nothing"
            return 0
        self.num_placeholder_tokens += 1
        self.num_drafts_in_flight = num_drafts
        return 1 + num_drafts

    def complete_step(self, num_samples: int) -> None:
        """Complete the oldest step in flight, which had `num_samples` samples."""
        self.num_steps_in_flight -= 1
        if num_samples:
            self.num_placeholder_tokens -= 1
        if num_samples > 1:
            self.num_drafts_in_flight = 0

    def update_drafts(self, new_token_ids: list[int], proposed: list[int] | None) -> None:
        """Store the drafts proposed for the tokens after those just added, or else what is left of earlier drafts."""
        count = len(new_token_ids)
        is_right = self.draft_token_ids[:count] == new_token_ids
        rest = self.draft_token_ids[count:] if is_right else []
        self.draft_token_ids = rest if proposed is None else proposed

    def start(self, now: float, num_cached_tokens: int) -> None:
        """Begin or resume running with the first `num_cached_tokens` tokens computed."""
        if self._status is RequestStatus.WAITING:
            self.scheduled_ts = now
            self.num_cached_tokens = num_cached_tokens
        self._move(RequestStatus.RUNNING)
        self.num_computed_tokens = num_cached_tokens

    def preempt(self) -> None:
        """Go back to waiting, with all tokens to be computed again; a search begins again."""
        self._move(RequestStatus.PREEMPTED)
        if self.beams is not None and self.beams.has_begun:
            self.beams.restart()
            del self.token_ids[self.num_prompt_tokens :]
            self.reported = False
        self.num_computed_tokens = self.num_short_steps = 0
        self.num_preemptions += 1

    def finish(self, reason: str) -> bool:
        """Finish the request; False if it has finished already."""
        if self.is_finished:
            return False
        self._move(RequestStatus.FINISHED)
        self.finish_reason = reason
        return True

    def _move(self, status: RequestStatus) -> None:
        assert status in _EDGES[self._status], f"{self!r} cannot become {status.name}"
        self._status = status
