# SPDX-License-Identifier: Apache-2.0
"""`Planner`: choice of the requests of a step, by starting and preempting requests.

Invariant: no state is kept between steps but the request that gets the next one for itself; `RequestQueues` holds the
requests.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from quire.config import SchedulerConfig
from quire.kv_cache.manager import KVCacheManager, PrefixHit
from quire.media import chunk_end, least_chunk
from quire.sampling_params import RequestOutputKind
from quire.scheduler.beams import Beams
from quire.scheduler.explain import Cause
from quire.scheduler.mixed_steps import MixedStepLimit
from quire.scheduler.output import BlockIds
from quire.scheduler.queues import RequestQueues
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.rounds import RoundBound, RoundLimit
from quire.scheduler.step import BlockedRequest, StepPlan

LOOK_AHEAD = 256
"""Waiting requests searched for one that may pass those that lack a slot for their adapter."""
PATIENCE_STEPS = 4
"""Steps in a row without room for a request's next chunk after which it gets a step of its own."""


class Planner:
    """Planner of the running requests, and of the tokens that a step computes of each."""

    def __init__(
        self,
        limits: SchedulerConfig,
        max_model_len: int,
        kv: KVCacheManager,
        queues: RequestQueues,
        rounds: RoundLimit,
        mixed: MixedStepLimit,
        max_adapters: int = 0,
        num_lookahead_tokens: int = 0,
        num_disjoint_steps: int = 1,
    ) -> None:
        self._limits = limits
        self._num_lookahead = num_lookahead_tokens
        self._num_disjoint = num_disjoint_steps
        self._rounds = rounds
        self._mixed = mixed
        self._max_adapters = max_adapters
        self._max_model_len = max_model_len
        self._kv = kv
        self._queues = queues
        self._impatient: Request | None = None
        self._last = 1, RoundBound.PROMPT

    def plan(self, step_id: int, now: float) -> StepPlan:
        """Return the next step, as `Scheduler.schedule` describes it."""
        step = StepPlan(step_id, now, self._limits.max_num_batched_tokens, *self._prompt_limits())
        allowed, bound = self._num_rounds()
        step.max_decode_steps = allowed
        if not self._plan_impatient(step, now):
            self._plan_running(step, now)
            step.next_running = None
            self._start_waiting(step, now)
        if len(self._queues.policy) or len(step.chunks) < len(
            self._queues.running
        ):  # a request was preempted
            step.max_decode_steps = 1
        if step.max_decode_steps < allowed:
            bound = RoundBound.BLOCKS if step.only_decodes else RoundBound.PROMPT
        self._last = step.max_decode_steps, bound
        return step

    def pace(self) -> str:
        """Describe the tokens of a running request in the last plan, and their bound, for a person."""
        return self._rounds.sentence(*self._last)

    def _plan_impatient(self, step: StepPlan, now: float) -> bool:
        """Give the step to the request whose next chunk found no room in many steps; False if none can have it.

        Its chunk is all of an item that attends both ways, and may be as large as a step. All others sit out, so it can
        lack nothing but blocks; then an ordinary step follows in its place.
        """
        request, self._impatient = self._impatient, None
        if request is None or request.is_finished:
            return False
        request.num_short_steps = 0
        if request.status is RequestStatus.RUNNING:
            step.num_satisfied = self._queues.num_rows - request.num_rows
            self._plan_one(request, step, now)
        elif len(self._queues.policy) and self._queues.policy.peek() is request:
            step.num_satisfied = self._queues.num_rows
            self._start(request, step, now)
        step.num_satisfied = 0
        return bool(step.chunks)

    def _num_rounds(self) -> tuple[int, RoundBound]:
        """Return the number of tokens that each running request may generate in the next step, one after the other.

        It exceeds 1 only while no request waits and all generate: a new request waits for all these tokens.
        `RoundLimit` gives the number that ends in time. With `multi_step_streams` False, no output may be read before
        its request ends.
        """
        most, bound = self._rounds.limit()
        if most == 1:
            return most, bound
        if not len(self._queues.running):
            return 1, RoundBound.PROMPT
        if len(self._queues.policy):
            return 1, RoundBound.WAITING
        for request in self._queues.running:
            missing = request.num_missing_tokens(self._max_model_len)
            if request.draft_token_ids or missing != 1 or request.beams is not None:
                return 1, RoundBound.PROMPT
            is_streamed = request.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY
            if is_streamed and self._limits.multi_step_streams is False:
                return 1, RoundBound.STREAMED
            left = request.max_computed_tokens(self._max_model_len) + 1 - request.num_tokens
            if left < most:
                most, bound = left, RoundBound.END
        return most, bound

    def _prompt_limits(self) -> tuple[int, int]:
        """Return the most tokens of one prompt, and of all, in the next step; lower while a request generates."""
        most, running = self._limits.max_num_batched_tokens, self._queues.running
        is_mixed = any(request.num_missing_tokens(self._max_model_len) == 1 for request in running)
        one = self._limits.long_prefill_token_threshold if is_mixed else 0
        return one or most, self._mixed.num_tokens(is_mixed=is_mixed)

    def _plan_running(self, step: StepPlan, now: float) -> None:
        """Plan missing tokens of running requests; if blocks are short, preempt the last for the first."""
        preempts = self._queues.policy.preempts
        for request in list(self._queues.running):
            if preempts and request.status is RequestStatus.RUNNING:
                step.next_running = request
                self._start_waiting(step, now)
            if self._is_full(step) or request.status is not RequestStatus.RUNNING:
                break
            self._plan_one(request, step, now)

    def _plan_one(self, request: Request, step: StepPlan, now: float) -> None:
        """Plan missing tokens of one running request, and drafts behind its last one."""
        if request.beams is not None and request.beams.has_begun:
            self._plan_beams(request, request.beams, step, now)
            return
        num_missing = room = num_new_tokens = self._num_missing(request)
        if num_missing > 1:
            room = min(num_missing, max(step.budget - self._num_unplanned(step) + 1, 1))
            num_new_tokens = self._num_fitting(request, request.num_computed_tokens, room, step)
        if (
            num_new_tokens == 0
        ):  # its remaining tokens, or the token to continue from, are in flight; or no room
            step.num_satisfied += request.num_rows
            return
        new_block_ids = self._allocate_or_preempt(request, num_new_tokens, now)
        if new_block_ids is None:
            return
        drafts: list[int] = []
        is_ahead = request.draft_token_ids or self._num_ahead(step)
        if not request.has_row:
            step.add_new(request, num_new_tokens, self._kv.get_block_ids(request))
        else:
            if num_new_tokens == num_missing and is_ahead:
                new_block_ids, drafts = self._allocate_drafts(request, num_new_tokens, new_block_ids, step)
            step.add_cached(request, num_new_tokens, new_block_ids, drafts)
        if num_new_tokens < num_missing:
            self._leave_rest(request, step, is_capped=num_new_tokens < room)

    def _plan_beams(self, request: Request, beams: Beams, step: StepPlan, now: float) -> None:
        """Plan a token of each next beam, in the rows that they take; if blocks are short, preempt the last requests.

        All of them in one step: without a result of the last one, or room for all tokens, the search sits this one out.
        """
        branch = beams.branch
        if branch is None or len(branch.rows) > step.budget:
            step.num_satisfied += request.num_rows
            return
        kept, moves = beams.kept_and_moved(branch)
        self._kv.free_tables([target for _, target in moves])
        while (new_block_ids := self._kv.branch(kept, moves, request.num_computed_tokens)) is None:
            self._queues.preempt_last(request, now)
            if request.status is not RequestStatus.RUNNING:
                return
        blocks = dict(zip(kept, new_block_ids, strict=True))
        step.add_beams(request, beams, branch, blocks, [self._kv.table_ids(target) for _, target in moves])
        self._queues.drop_rows(beams.settle(branch))

    def _num_fitting(self, request: Request, start: int, room: int, step: StepPlan) -> int:
        """Return the tokens of a prompt from `start` on to compute in `room` tokens; 0 if its next item does not fit.

        The first chunk of a step may use up the step, so that an item as large as a step is computed at all.
        """
        num_tokens = min(room, step.prompt_cap, step.prompt_room) if room > 1 else room
        if not request.media or (room > 1 and not step.prompt_room):
            return num_tokens
        fitting = chunk_end(request.media, start, start + num_tokens) - start
        if fitting > 0:
            return fitting
        least = least_chunk(request.media, start)
        if least <= (room if step.chunks else step.budget):
            return least
        request.num_short_steps += 1
        if self._impatient is None and request.num_short_steps >= PATIENCE_STEPS:
            self._impatient = request
        return 0

    def _num_missing(self, request: Request) -> int:
        """Return the tokens to compute next; 0 under disjoint steps while a sampled token is in flight."""
        if self._num_disjoint > 1 and request.num_placeholder_tokens:
            return 0
        return request.num_missing_tokens(self._max_model_len)

    def _is_full(self, step: StepPlan) -> bool:
        return step.budget == 0 or step.num_rows >= self._share(self._queues.num_rows)

    def _share(self, num_requests: int) -> int:
        """Return the most of `num_requests` that one of the disjoint steps in flight has.

        So no request waits longer than for the other steps: the requests that these leave fit into one step.
        """
        return -(-num_requests // self._num_disjoint)

    def _num_unplanned(self, step: StepPlan) -> int:
        """Return the number of running rows yet to be planned in a step, each with at least one token."""
        num = self._queues.num_rows
        return max(min(num - step.num_satisfied, self._share(num)) - step.num_rows, 0)

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int, now: float) -> BlockIds | None:
        """Return blocks for a running request, preempting the last ones if needed; None if it was itself preempted.

        The first running request always gets its blocks: alone, it fits (see `check_admissible`). So every step
        advances a request, unless steps in flight already do, and no request waits forever.
        """
        while request.status is RequestStatus.RUNNING:
            block_ids = self._kv.allocate_slots(request, num_new_tokens)
            if block_ids is not None:
                return block_ids
            self._queues.preempt_last(request, now)
        return None

    def _allocate_drafts(
        self, request: Request, num_new_tokens: int, block_ids: BlockIds, step: StepPlan
    ) -> tuple[BlockIds, list[int]]:
        """Return drafts to verify after a request's last token, with blocks for both and for lookahead tokens.

        No request waits or is preempted for these: they take what the budget and the free blocks leave.
        """
        limit = step.budget - self._num_unplanned(step) + 1 - num_new_tokens
        drafts = request.next_drafts(limit, self._max_model_len)
        num_tokens = request.num_computed_tokens + num_new_tokens + len(drafts)
        most = max(request.max_computed_tokens(self._max_model_len), num_tokens)
        for end in (min(num_tokens + self._num_ahead(step), most), num_tokens):
            draft_block_ids = self._kv.allocate_drafts(request, end, step.promised_blocks)
            if draft_block_ids is not None:
                return [own + new for own, new in zip(block_ids, draft_block_ids, strict=True)], drafts
            step.max_decode_steps = 1
        return block_ids, []

    def _num_ahead(self, step: StepPlan) -> int:
        """Return the lookahead tokens for which a request gets blocks: a draft model's, or further rounds'."""
        return self._num_lookahead or step.max_decode_steps - 1

    def _start_waiting(self, step: StepPlan, now: float) -> None:
        """Start waiting requests in the policy's order until one does not fit; skip any that lack only an adapter slot.

        While running requests are yet to be planned, only requests that outrank the next of them start.
        """
        while step.blocked is None and (request := self._next_in_line(step)) is not None:
            if step.next_running and not self._queues.policy.outranks(request, step.next_running):
                break
            blocked = self._start(request, step, now)
            if blocked is None:
                _note_overtaken(request, step)
            elif blocked.cause is Cause.ADAPTER:
                step.passed_over[request] = None
            else:
                step.blocked = blocked

    def _next_in_line(self, step: StepPlan) -> Request | None:
        """Return the first waiting request that takes no adapter slot from those passed over.

        If some were, it has no adapter, or one in use while each of them was overtaken fewer than `max_num_seqs` times.
        So adapters in use are released in the end, and no other starves. Only the first `LOOK_AHEAD` are searched.
        """
        policy = self._queues.policy
        if not step.passed_over:
            return policy.peek() if len(policy) else None
        used = self._adapters_in_use()
        for request in islice(policy, LOOK_AHEAD):
            if request in step.passed_over:
                continue
            if request.adapter is None:
                return request
            if request.adapter not in used:
                step.passed_over[request] = None
            elif all(other.num_overtaken < self._limits.max_num_seqs for other in step.passed_over):
                return request
        return None

    def _start(self, request: Request, step: StepPlan, now: float) -> BlockedRequest | None:
        """Start or resume a request if a first chunk fits the budget and all known tokens fit the cache.

        Requiring room for all tokens, not only the chunk's, keeps a preempted request from being resumed only to be
        preempted again. It resumes with all its tokens, so none may be in flight.
        """
        if request.num_steps_in_flight:
            return BlockedRequest(request, Cause.NEXT_STEP)
        if self._budget_to_start(step) <= 0:
            return BlockedRequest(request, Cause.TOKEN_BUDGET)
        if self._lacks_row(request) and not self._outranks_last(request, step):
            return BlockedRequest(request, Cause.SEQUENCE_CAP)
        num_others = min(self._queues.num_rows + len(self._queues.policy), self._limits.max_num_seqs)
        if self._num_disjoint > 1 and step.num_rows >= self._share(num_others):
            return BlockedRequest(request, Cause.NEXT_STEP)
        hit = self._find_prefix(request, step)
        if self._num_first(request, hit, step) == 0:
            return BlockedRequest(request, Cause.TOKEN_BUDGET)
        hit, blocked = self._find_room(request, hit, step, now)
        room, num_new_tokens = self._first_chunk(request, hit, step), self._num_first(request, hit, step)
        if blocked is not None or num_new_tokens == 0:
            return blocked or BlockedRequest(request, Cause.TOKEN_BUDGET)
        self._queues.start(request, hit, now)
        allocated = self._kv.allocate_slots(request, num_new_tokens)
        assert allocated is not None, "the room just found is gone"
        step.add_new(request, num_new_tokens, self._kv.get_block_ids(request))
        self._leave_rest(request, step, is_capped=num_new_tokens < room)
        return None

    def _find_room(
        self, request: Request, hit: PrefixHit, step: StepPlan, now: float
    ) -> tuple[PrefixHit, BlockedRequest | None]:
        """Find a row and free blocks for a waiting request, preempting running requests that it outranks if needed.

        No request is preempted unless that suffices. Victims cannot thrash: the request permanently outranks them, and
        they resume after it. Also returns the updated hit: a victim swapped to the host may evict part of it, or be the
        parent of the shared prompt.
        """
        blocked = self._lack(request, hit, step)
        if blocked is None or not self._outranks_last(request, step):
            return hit, blocked
        outranked = [other for other in self._queues.running if self._outranks(request, other, step)]
        if blocked.num_blocks > sum(map(self._kv.num_held_blocks, outranked)):
            return hit, blocked
        if self._lacks_adapter(request, without=outranked):
            return hit, BlockedRequest(request, Cause.ADAPTER)
        while blocked is not None and self._outranks_last(request, step):
            self._queues.preempt_last(request, now)
            hit = self._find_prefix(request, step)
            blocked = self._lack(request, hit, step)
        return hit, blocked

    def _lack(self, request: Request, hit: PrefixHit, step: StepPlan) -> BlockedRequest | None:
        """Return what a waiting request lacks: blocks beyond those promised in this step, a row, or an adapter slot."""
        num_short = self._kv.num_blocks_short(request, hit) + step.promised_blocks
        if num_short > 0:
            return BlockedRequest(request, Cause.BLOCKS, num_short)
        if self._lacks_row(request):
            return BlockedRequest(request, Cause.SEQUENCE_CAP)
        return BlockedRequest(request, Cause.ADAPTER) if self._lacks_adapter(request) else None

    def _lacks_row(self, request: Request) -> bool:
        """Return whether the rows that a waiting request takes are not free."""
        return self._queues.num_rows + request.num_rows > self._limits.max_num_seqs

    def _lacks_adapter(self, request: Request, without: Collection[Request] = ()) -> bool:
        """Return whether the other running requests use all adapter slots, none for the request's adapter."""
        if request.adapter is None:
            return False
        used = self._adapters_in_use(without)
        return request.adapter not in used and len(used) >= self._max_adapters

    def _adapters_in_use(self, without: Collection[Request] = ()) -> set[str]:
        return {other.adapter for other in self._queues.running if other.adapter and other not in without}

    def _outranks_last(self, request: Request, step: StepPlan) -> bool:
        return len(self._queues.running) > 0 and self._outranks(request, self._queues.running.last, step)

    def _outranks(self, request: Request, running: Request, step: StepPlan) -> bool:
        """Return whether the policy lets a waiting request replace a running one that is not planned yet."""
        return (
            step.next_running is not None
            and running.rank >= step.next_running.rank
            and self._queues.policy.outranks(request, running)
        )

    def _leave_rest(self, request: Request, step: StepPlan, *, is_capped: bool) -> None:
        """Reserve blocks for known tokens of a planned request that this step did not reach.

        `is_capped`: only limits of prompts beside requests that generate kept more of them out.
        """
        if is_capped:
            step.capped.add(request)
        if request.num_computed_tokens < request.num_tokens:
            step.promised_blocks += self._kv.num_blocks_to_finish(request)

    def _find_prefix(self, request: Request, step: StepPlan) -> PrefixHit:
        """Return the prefix that a request need not compute: swapped out, its parent's, or cached.

        Prompt logprobs need every position to be computed, and sampler state every position after which a token was
        sampled; a request may skip the prefix cache. A request that starts over has no swapped blocks, either.
        """
        if request.starts_over:
            return self._kv.no_hit
        swapped = self._kv.get_swapped_blocks(request)
        if swapped is not None:
            return swapped
        if request.sampling_params.prompt_logprobs is not None:
            return self._kv.no_hit
        is_blind = request.sampling_params.skip_reading_prefix_cache
        parent, num_tokens = request.parent, request.num_prompt_tokens - 1
        most = num_tokens if request.sampling_params.has_sampler_state else None
        shared = self._kv.no_hit
        if parent and parent.status is RequestStatus.RUNNING and step.num_ready_tokens(parent) >= num_tokens:
            shared = self._kv.get_forked_blocks(parent, num_tokens)
        if is_blind or shared.num_tokens == request.num_tokens - 1:  # the cache has no more
            return shared
        cached = self._kv.get_computed_blocks(request, most)
        return cached if cached.num_tokens >= shared.num_tokens else shared

    def _budget_to_start(self, step: StepPlan) -> int:
        """Return the rest of a step's budget, less a token for each running request yet to be planned."""
        return step.budget - self._num_unplanned(step)

    def _first_chunk(self, request: Request, hit: PrefixHit, step: StepPlan) -> int:
        """Return the tokens of a waiting request that have room now; 0 to wait for a step with more.

        Without chunked prefill a prompt is computed in one step. Only one that exceeds a whole step is still split: a
        resumed request may have grown past it and must still finish.
        """
        num_missing, budget = request.num_tokens - hit.num_tokens, self._budget_to_start(step)
        if num_missing <= budget:
            return num_missing
        may_split = self._limits.enable_chunked_prefill or num_missing > self._limits.max_num_batched_tokens
        return budget if may_split else 0

    def _num_first(self, request: Request, hit: PrefixHit, step: StepPlan) -> int:
        """Return the tokens of a waiting request to compute now; 0 to wait for a step with more room."""
        room = self._first_chunk(request, hit, step)
        return self._num_fitting(request, hit.num_tokens, room, step) if room else 0


def _note_overtaken(request: Request, step: StepPlan) -> None:
    """Count a started request with an adapter for the requests passed over, which may wait for its slot."""
    if request.adapter is not None:
        for other in step.passed_over:
            other.num_overtaken += 1
