"""`Request`: one sequence to generate, or to pool, as the scheduler sees it.

Invariant: `status` moves along the edges of `_EDGES` only, and a finished request never changes again.
`num_computed_tokens` counts tokens whose keys and values are in the cache or will be after the steps in flight; a draft
counts once it is accepted. A request with drafts in flight is not planned again until it is known which are.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from quire.kv_cache.hashing import BlockHash, ExtraKeys
from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduler.explain import WaitLog

Rank = tuple[float, int]
"""Place in the order of service, lower first: what the policy says, then the number of arrival."""


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()
    """Never scheduled; holds no blocks and no row."""
    RUNNING = enum.auto()
    """Holds blocks and a row of the worker's batch."""
    PREEMPTED = enum.auto()
    """Waiting again: lost its blocks and its row, kept its tokens."""
    FINISHED = enum.auto()
    """Over, for one reason, and for good."""


_EDGES = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set[RequestStatus](),
}


class Request:
    """State of one request; the keywords of the constructor are the fields of the core's add message.

    Attributes:
        prompt_token_ids: the list as it was given, which the forks of a prompt share; nobody changes it.
        pooling_params: what is wanted instead of tokens; with them it ends with its prompt, and samples nothing.
        second_text_start: where the second of two texts begins in the prompt.
        instruction_length: tokens at the prompt's start that are read and not pooled.
        token_ids: all known tokens, `num_prompt_tokens` of the prompt and then the generated ones.
        num_computed_tokens: how many tokens are computed; the scheduler lets this catch up.
        num_placeholder_tokens: tokens that steps in flight sample; they follow `token_ids` and can be planned.
        draft_token_ids: guesses of the tokens behind `token_ids`, to be verified; they may be wrong.
        num_drafts_in_flight: how many of them a step in flight verifies.
        num_steps_in_flight: steps that compute something of it and have not come back.
        num_cached_tokens: how many were found in the prefix cache when the request first ran.
        block_hashes: names of the first full blocks, for the KV cache manager.
        lora_request: the adapter that it is computed with.
        parent: the request whose tokens it shares, while that may save computing them (`quire.scheduler.forks`).
        num_beams, beam: it is this one of so many, and is kept when it ends (`quire.scheduler.kept`).
        num_overtaken: requests with adapters that have started while it waited for a place for its own.
        num_prompt_logprobs: prompt positions whose logprobs were reported already.
        queued_ts, scheduled_ts: monotonic seconds; 0.0 until it happened.
        number, rank: the order of arrival, set by the scheduler, and of service, set by its policy.
        starts_over: whether it must be computed from its first token on, without a break, and so takes nothing that was
            computed before: it is pooled, and that needs every token's hidden state. Set by the scheduler.
        wait: what kept the request waiting, and how long.
    """

    # Attributes that would be slow to reach otherwise: 30 are more than CPython keeps in an instance's shared layout.
    __slots__ = (
        "_status",
        "arrival_time",
        "beam",
        "block_hashes",
        "draft_token_ids",
        "eos_token_ids",
        "extra_keys",
        "finish_reason",
        "fork_of",
        "instruction_length",
        "lora_request",
        "num_beams",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts_in_flight",
        "num_overtaken",
        "num_placeholder_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
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
        num_beams: int = 0,
        beam: int = 0,
        second_text_start: int | None = None,
        instruction_length: int | None = None,
        lora_request: LoRARequest | None = None,
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
        self.num_beams = num_beams
        self.beam = beam
        self.parent: Request | None = None
        self.starts_over = False
        self.lora_request = lora_request
        self.extra_keys = ExtraKeys(cache_salt, None if lora_request is None else lora_request.key)
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
        """What stands for the weights that are added to the model's."""
        return self.extra_keys.adapter

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
        """Tokens to compute at most, given the model's limit.

        That is all of a prompt to pool. The last token that a request may generate is never computed: nothing is
        sampled from it.
        """
        if self.pooling_params is not None:
            return self.num_prompt_tokens
        if self.sampling_params.max_tokens is None:
            return max_model_len - 1
        return min(self.num_prompt_tokens + self.sampling_params.max_tokens, max_model_len) - 1

    def num_missing_tokens(self, max_model_len: int) -> int:
        """Tokens to compute next, among them at most one that a step in flight has yet to sample, and no drafts."""
        if self.num_placeholder_tokens == 0:  # one that generates is short of its last token
            return len(self.token_ids) - self.num_computed_tokens
        if self.num_drafts_in_flight:  # then nobody knows where its next token stands
            return 0
        num_to_compute = self.max_computed_tokens(max_model_len)
        return min(self.num_tokens + self.num_placeholder_tokens, num_to_compute) - self.num_computed_tokens

    def next_drafts(self, max_num_drafts: int, max_model_len: int) -> list[int]:
        """Drafts to verify in the step that computes the request's last token, which may itself be in flight.

        What is sampled behind the last draft must still be a token that the request may have.
        """
        first = self.num_placeholder_tokens
        num_known = self.num_tokens + first
        room = min(max_num_drafts, self.max_computed_tokens(max_model_len) - num_known)
        return self.draft_token_ids[first : first + max(room, 0)]

    def advance(self, num_tokens: int, num_drafts: int = 0) -> int:
        """Put the next tokens into a step, and drafts behind the last one; returns how many tokens are sampled."""
        self.num_computed_tokens += num_tokens
        self.num_steps_in_flight += 1
        is_short = self.num_computed_tokens < len(self.token_ids) + self.num_placeholder_tokens
        if is_short or self.pooling_params is not None:
            assert num_drafts == 0, f"drafts for {self!r}, which samples nothing"
            return 0
        self.num_placeholder_tokens += 1
        self.num_drafts_in_flight = num_drafts
        return 1 + num_drafts

    def settle(self, num_samples: int) -> None:
        """The oldest of its steps in flight, which had so many samples, has come back."""
        self.num_steps_in_flight -= 1
        if num_samples:
            self.num_placeholder_tokens -= 1
        if num_samples > 1:
            self.num_drafts_in_flight = 0

    def update_drafts(self, new_token_ids: list[int], proposed: list[int] | None) -> None:
        """Keep what is proposed to follow the tokens just added, or else what is left of earlier guesses."""
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
        """Go back to waiting, with all tokens to be computed again."""
        self._move(RequestStatus.PREEMPTED)
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def finish(self, reason: str) -> bool:
        """End the request; False, and nothing done, if it has ended already."""
        if self.is_finished:
            return False
        self._move(RequestStatus.FINISHED)
        self.finish_reason = reason
        return True

    def _move(self, status: RequestStatus) -> None:
        assert status in _EDGES[self._status], f"{self!r} cannot become {status.name}"
        self._status = status
