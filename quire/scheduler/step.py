"""`StepPlan`: one step while it is being planned, and the memory of it until its result comes back.

Invariant: the chunks are in the order of the plan, their sizes sum to at most the budget, and a request has
at most one of them.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.kv_cache.manager import PlannedMoves
from quire.scheduler.explain import Cause
from quire.scheduler.output import BlockIds, NewRequestData, ScheduledRequest, SchedulerOutput
from quire.scheduler.request import Request


class Chunk(NamedTuple):
    """Tokens `start` to `end` (exclusive) of a request, computed in one step, and drafts behind them.

    `num_samples` is 0 if they do not reach its last token, or if it is to be pooled, else one more than the drafts.
    """

    request: Request
    start: int
    end: int
    num_samples: int

    @property
    def num_drafts(self) -> int:
        return max(self.num_samples - 1, 0)

    @property
    def pools(self) -> bool:
        """Whether the request is pooled when these are computed, the last of its prompt."""
        return self.request.pooling_params is not None and self.end == self.request.num_tokens


class Blocked(NamedTuple):
    """A waiting request cannot start; `num_blocks` is how many are missing, if that is the cause."""

    request: Request
    cause: Cause
    num_blocks: int = 0


class StepPlan:
    """Collects what a step computes.

    Attributes:
        planned_ts: time of the plan, in seconds.
        budget: number of tokens it may still take.
        prompt_cap: most tokens of one prompt.
        promised_blocks: free blocks that planned requests need for known tokens which later steps compute.
        num_satisfied: running requests that need nothing, because all that they may still have is in flight.
        next_running: the running request that is planned next; None once all of them have their tokens.
        passed_over: waiting requests that lack a place for their adapter alone; others may start.
        blocked: the first of the other waiting requests and why it cannot start; nothing else starts then.
        max_rounds: tokens that each request may generate in it, one after the other.
        capped: requests of which `prompt_cap` alone kept tokens out.
    """

    def __init__(self, step_id: int, planned_ts: float, budget: int, prompt_cap: int) -> None:
        self.step_id = step_id
        self.planned_ts = planned_ts
        self.budget = budget
        self.prompt_cap = prompt_cap
        self.promised_blocks = 0
        self.max_rounds = 1
        self.num_satisfied = 0
        self.next_running: Request | None = None
        self.passed_over: dict[Request, None] = {}
        self.blocked: Blocked | None = None
        self.capped: set[Request] = set()
        self.chunks: list[Chunk] = []
        self._new_requests: list[NewRequestData] = []
        self._scheduled: list[ScheduledRequest] = []

    @property
    def only_decodes(self) -> bool:
        """Whether it computes one token of each of its requests, and all of them sample."""
        return bool(self.chunks) and all(
            chunk.end - chunk.start == chunk.num_samples == 1 for chunk in self.chunks
        )

    def add_new(self, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """Plan the first tokens of a request for which the worker has no row."""
        data = NewRequestData(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            eos_token_ids=request.eos_token_ids,
            pooling_params=request.pooling_params,
            second_text_start=request.second_text_start,
            instruction_length=request.instruction_length,
            owner=(request.tenant, request.cache_salt),
            lora_request=request.lora_request,
        )
        self._new_requests.append(data)
        self.max_rounds = 1  # whoever starts has blocks for these tokens and no others
        self._take(request, num_tokens, [], [])

    def add_cached(
        self, request: Request, num_tokens: int, new_block_ids: BlockIds, draft_token_ids: list[int]
    ) -> None:
        """Plan the next tokens of a request that has a row, and drafts behind its last one."""
        self._take(request, num_tokens, new_block_ids, draft_token_ids)

    def num_ready_tokens(self, request: Request) -> int:
        """Tokens of a running request that are in the cache before this step's forward pass."""
        planned = (chunk.start for chunk in self.chunks if chunk.request is request)
        return next(planned, request.num_computed_tokens)

    def seal(self, removed_request_ids: list[str], moves: PlannedMoves) -> SchedulerOutput:
        """The plan as the executor gets it."""
        return SchedulerOutput(
            step_id=self.step_id,
            new_requests=self._new_requests,
            scheduled=self._scheduled,
            removed_request_ids=removed_request_ids,
            swap_outs=moves.swap_outs,
            swap_ins=moves.swap_ins,
            block_copies=moves.block_copies,
            max_rounds=self.max_rounds,
        )

    def _take(
        self, request: Request, num_tokens: int, new_block_ids: BlockIds, draft_token_ids: list[int]
    ) -> None:
        num_drafts = len(draft_token_ids)
        total = num_tokens + num_drafts
        assert num_drafts < total <= self.budget, f"{total} tokens of {self.budget} planned for {request!r}"
        start = request.num_computed_tokens
        num_samples = request.advance(num_tokens, num_drafts)
        chunk = Chunk(request, start, start + num_tokens, num_samples)
        pools = num_samples == 0 and chunk.pools
        self._scheduled.append(
            ScheduledRequest(
                request.request_id, start, total, num_samples, new_block_ids, draft_token_ids, pools
            )
        )
        self.chunks.append(chunk)
        self.budget -= total
