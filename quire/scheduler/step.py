# SPDX-License-Identifier: Apache-2.0
"""Plan of one step, kept until its result comes back.

Invariant: chunks are in plan order, their sizes sum to at most the budget, and a request has at most one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import structs

from quire.kv_cache.manager import PlannedMoves
from quire.scheduler.beams import Beams, Branch
from quire.scheduler.explain import Cause
from quire.scheduler.output import BlockIds, BranchedRow, NewRequestData, ScheduledRequest, SchedulerOutput
from quire.scheduler.request import Request


class Chunk(NamedTuple):
    """Tokens `start` to `end` (exclusive) of a request computed in one step, and the drafts behind them.

    `num_samples` is 0 if the chunk does not reach the request's last token or the request is pooled, else 1 + the
    number of drafts.
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
        """True if the request is pooled with this chunk, the last of its prompt."""
        return self.request.pooling_params is not None and self.end == self.request.num_tokens


class BlockedRequest(NamedTuple):
    """Waiting request that cannot start; `num_blocks` is the number of missing blocks, if blocks are the cause."""

    request: Request
    cause: Cause
    num_blocks: int = 0


class StepPlan:
    """Plan of one step under construction.

    Attributes:
        planned_ts: time of the plan, in seconds.
        budget: number of tokens that still fit.
        prompt_cap: most tokens of one prompt.
        prompt_room: number of tokens of prompts that may still be planned; a single token always may.
        num_prompt_tokens: number of tokens planned in chunks of several, which are of prompts.
        promised_blocks: free blocks reserved for known tokens of planned requests that later steps compute.
        num_rows: rows of the planned requests.
        num_satisfied: rows that need no token in this step, because all they may still get is in flight.
        next_running: next running request to plan; None once all of them have their tokens.
        passed_over: waiting requests that lack only an adapter slot; others may start before them.
        blocked: first other waiting request that cannot start, and the cause; no later request starts then.
        max_decode_steps: decode steps that the worker may run for this plan (multi-step decode).
        capped: requests limited by `prompt_cap` or `prompt_room` alone.
    """

    def __init__(
        self, step_id: int, planned_ts: float, budget: int, prompt_cap: int, prompt_room: int
    ) -> None:
        self.step_id = step_id
        self.planned_ts = planned_ts
        self.budget = budget
        self.prompt_cap = prompt_cap
        self.prompt_room = prompt_room
        self.num_prompt_tokens = 0
        self.promised_blocks = 0
        self.max_decode_steps = 1
        self.num_satisfied = 0
        self.next_running: Request | None = None
        self.passed_over: dict[Request, None] = {}
        self.blocked: BlockedRequest | None = None
        self.capped: set[Request] = set()
        self.num_rows = 0
        self.chunks: list[Chunk] = []
        self._branches: list[BranchedRow] = []
        self._new_requests: list[NewRequestData] = []
        self._scheduled: list[ScheduledRequest] = []

    @property
    def only_decodes(self) -> bool:
        """True if the step computes one token of each of its requests, and all of them sample."""
        return bool(self.chunks) and all(
            chunk.end - chunk.start == chunk.num_samples == 1 for chunk in self.chunks
        )

    def add_new(self, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """Plan the first tokens of a request for which the worker has no row."""
        data = self._row_data(request, block_ids)
        self._new_requests.append(data)
        request.has_row = True
        self.max_decode_steps = 1  # a new request has blocks for these tokens only
        self._take(request, num_tokens, [], [])

    def add_beams(
        self,
        request: Request,
        beams: Beams,
        branch: Branch,
        grown: Mapping[str, BlockIds],
        moved: Iterable[BlockIds],
    ) -> None:
        """Plan a token of each next beam of a search.

        Args:
            grown: new blocks of the rows that continue themselves.
            moved: all blocks of each of the others, in order.
        """
        tables, num_logprobs = iter(moved), beams.search.num_logprobs
        start = request.num_computed_tokens
        params = request.sampling_params.replace_unchecked(logprobs=num_logprobs)
        for row, source, beam in zip(*branch, beams.search.live, strict=True):
            name, token_id = beams.name(row), beam.token_ids[-1]
            own, all_ids = (grown[name], []) if row == source else ([], next(tables))
            if beams.has_row(row):
                self._branches.append(BranchedRow(name, beams.name(source), token_id, all_ids, num_logprobs))
            else:
                tokens = [*request.prompt_token_ids, *beam.token_ids]
                data = self._row_data(request, all_ids)
                self._new_requests.append(
                    structs.replace(data, request_id=name, token_ids=tokens, sampling_params=params)
                )
            self._scheduled.append(ScheduledRequest(name, start, 1, 1, own))
        num_samples = request.advance(1)
        self._note(Chunk(request, start, start + 1, num_samples), len(branch.rows))

    def _row_data(self, request: Request, block_ids: BlockIds) -> NewRequestData:
        return NewRequestData(
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
            adapter_request=request.adapter_request,
            media=request.media,
        )

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
        """Return the finished plan for the executor."""
        return SchedulerOutput(
            step_id=self.step_id,
            new_requests=self._new_requests,
            scheduled=self._scheduled,
            removed_request_ids=removed_request_ids,
            swap_outs=moves.swap_outs,
            swap_ins=moves.swap_ins,
            block_copies=moves.block_copies,
            branches=self._branches,
            max_decode_steps=self.max_decode_steps,
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
        self._note(chunk, total)
        if num_tokens > 1:
            self.prompt_room = max(self.prompt_room - num_tokens, 0)
            self.num_prompt_tokens += num_tokens

    def _note(self, chunk: Chunk, num_tokens: int) -> None:
        self.chunks.append(chunk)
        self.num_rows += chunk.request.num_rows
        self.budget -= num_tokens
