"""`Planner`: fills a step with the requests that run in it, and starts and preempts requests to that end.

Invariant: it remembers nothing from one step to the next; who is where it asks and tells `RequestQueues`.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from quire.config import SchedulerConfig
from quire.kv_cache.manager import KVCacheManager, PrefixHit
from quire.sampling_params import RequestOutputKind
from quire.scheduler.explain import Cause
from quire.scheduler.output import BlockIds
from quire.scheduler.queues import RequestQueues
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.rounds import RoundLimit
from quire.scheduler.step import Blocked, StepPlan

LOOK_AHEAD = 256
"""Waiting requests among which one is looked for that may pass those that lack a place for their adapter."""


class Planner:
    """Decides who runs, and what a step computes of them."""

    def __init__(
        self,
        limits: SchedulerConfig,
        max_model_len: int,
        kv: KVCacheManager,
        queues: RequestQueues,
        rounds: RoundLimit,
        max_adapters: int = 0,
        num_lookahead_tokens: int = 0,
        num_disjoint_steps: int = 1,
    ) -> None:
        self._limits = limits
        self._num_lookahead = num_lookahead_tokens
        self._num_disjoint = num_disjoint_steps
        self._rounds = rounds
        self._max_adapters = max_adapters
        self._max_model_len = max_model_len
        self._kv = kv
        self._queues = queues

    def plan(self, step_id: int, now: float) -> StepPlan:
        """The next step, as `Scheduler.schedule` describes it."""
        step = StepPlan(step_id, now, self._limits.max_num_batched_tokens, self._prompt_cap())
        step.max_rounds = self._num_rounds()
        self._plan_running(step, now)
        step.next_running = None
        self._start_waiting(step, now)
        if len(self._queues.policy) or len(step.chunks) < len(self._queues.running):  # somebody was preempted
            step.max_rounds = 1
        return step

    def _num_rounds(self) -> int:
        """Tokens that all running requests may generate in the next step, one after the other.

        More than one only while no request waits, and all generate: a request that comes meanwhile waits for them all.
        `RoundLimit` says how many end in time. Without `multi_step_streams` no output may be read before its request
        ends.
        """
        most = self._rounds.num_rounds()
        if most == 1 or len(self._queues.policy) or not len(self._queues.running):
            return 1
        for request in self._queues.running:
            if request.draft_token_ids or request.num_missing_tokens(self._max_model_len) != 1:
                return 1
            is_streamed = request.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY
            if is_streamed and self._limits.multi_step_streams is False:
                return 1
            most = min(most, request.max_computed_tokens(self._max_model_len) + 1 - request.num_tokens)
        return most

    def _prompt_cap(self) -> int:
        """Most tokens of one prompt in the next step; limited only while somebody generates."""
        cap = self._limits.long_prefill_token_threshold
        running = self._queues.running
        if cap and any(request.num_missing_tokens(self._max_model_len) == 1 for request in running):
            return cap
        return self._limits.max_num_batched_tokens

    def _plan_running(self, step: StepPlan, now: float) -> None:
        """Let running requests catch up, the first ones at the cost of the last if blocks are short."""
        preempts = self._queues.policy.preempts
        for request in list(self._queues.running):
            if preempts and request.status is RequestStatus.RUNNING:
                step.next_running = request
                self._start_waiting(step, now)
            if self._is_full(step) or request.status is not RequestStatus.RUNNING:
                break
            num_missing = room = num_new_tokens = self._num_missing(request)
            if num_missing == 0:  # all that it may still have is in flight, or what it goes on from
                step.num_satisfied += 1
                continue
            if num_missing > 1:
                room = min(num_missing, max(step.budget - self._num_unplanned(step) + 1, 1))
                num_new_tokens = min(room, step.prompt_cap)
            new_block_ids = self._allocate_or_preempt(request, num_new_tokens, now)
            if new_block_ids is not None:
                drafts: list[int] = []
                is_ahead = request.draft_token_ids or self._num_ahead(step)
                if num_new_tokens == num_missing and is_ahead:
                    new_block_ids, drafts = self._allocate_drafts(
                        request, num_new_tokens, new_block_ids, step
                    )
                step.add_cached(request, num_new_tokens, new_block_ids, drafts)
                if num_new_tokens < num_missing:
                    self._leave_rest(request, step, is_capped=num_new_tokens < room)

    def _num_missing(self, request: Request) -> int:
        """Tokens of a running request to compute next. Steps of different requests wait for what it samples."""
        if self._num_disjoint > 1 and request.num_placeholder_tokens:
            return 0
        return request.num_missing_tokens(self._max_model_len)

    def _is_full(self, step: StepPlan) -> bool:
        """Whether a step takes no more running requests."""
        return step.budget == 0 or len(step.chunks) >= self._share(len(self._queues.running))

    def _share(self, num_requests: int) -> int:
        """How many of some requests one step has, where others in flight have the rest.

        So nobody is left behind for more than the others' steps: what these leave over is no more than one may have.
        """
        return -(-num_requests // self._num_disjoint)

    def _num_unplanned(self, step: StepPlan) -> int:
        """Running requests that have yet to get their tokens of a step, of which each will want one."""
        num = len(self._queues.running)
        return max(min(num - step.num_satisfied, self._share(num)) - len(step.chunks), 0)

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int, now: float) -> BlockIds | None:
        """Blocks for a running request, taken from the last ones if need be; None if it was itself the last.

        The first running request always gets what it needs: alone, it fits (see `check_admissible`). So every
        step advances somebody, unless steps in flight already do, and nobody waits for ever.
        """
        while request.status is RequestStatus.RUNNING:
            block_ids = self._kv.allocate_slots(request, num_new_tokens)
            if block_ids is not None:
                return block_ids
            if self._queues.kept.drop_blocks():
                continue
            self._queues.preempt_last(request, now)
        return None

    def _allocate_drafts(
        self, request: Request, num_new_tokens: int, block_ids: BlockIds, step: StepPlan
    ) -> tuple[BlockIds, list[int]]:
        """Drafts to verify behind a request's last token, with the blocks for both, and for what a model drafts next,
        or further rounds generate.

        Nobody waits or is preempted for these: they take what the budget and the free blocks leave.
        """
        limit = step.budget - self._num_unplanned(step) + 1 - num_new_tokens
        drafts = request.next_drafts(limit, self._max_model_len)
        num_tokens = request.num_computed_tokens + num_new_tokens + len(drafts)
        most = max(request.max_computed_tokens(self._max_model_len), num_tokens)
        for end in (min(num_tokens + self._num_ahead(step), most), num_tokens):
            draft_block_ids = self._kv.allocate_drafts(request, end, step.promised_blocks)
            if draft_block_ids is not None:
                return [own + new for own, new in zip(block_ids, draft_block_ids, strict=True)], drafts
            step.max_rounds = 1
        return block_ids, []

    def _num_ahead(self, step: StepPlan) -> int:
        """Tokens behind the known ones for which a request gets blocks: a drafting model's, or further rounds'."""
        return self._num_lookahead or step.max_rounds - 1

    def _start_waiting(self, step: StepPlan, now: float) -> None:
        """Start waiting requests, in the policy's order, until one does not fit; who lacks no more than a place for an
        adapter is passed over.

        While running ones are yet to be planned, only those that outrank the next of them.
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
        """The first that waits, or behind those that are passed over the first that takes no place from them.

        It has no adapter, or one that running requests have while none of those passed over has let as many such by as
        may run: so the adapters in use come to an end, and no other starves. Only the first `LOOK_AHEAD` are looked at.
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

    def _start(self, request: Request, step: StepPlan, now: float) -> Blocked | None:
        """Start or resume a request if a first chunk fits the budget and all known tokens fit the cache.

        Asking for room for all tokens, not only the chunk's, keeps a preempted request from coming back just
        to be preempted again. It comes back with all its tokens, so those in flight must be in.
        """
        if request.num_steps_in_flight:
            return Blocked(request, Cause.NEXT_STEP)
        if self._budget_to_start(step) <= 0:
            return Blocked(request, Cause.TOKEN_BUDGET)
        if len(self._queues.running) >= self._limits.max_num_seqs and not self._outranks_last(request, step):
            return Blocked(request, Cause.SEQUENCE_CAP)
        num_others = min(len(self._queues.running) + len(self._queues.policy), self._limits.max_num_seqs)
        if self._num_disjoint > 1 and len(step.chunks) >= self._share(num_others):
            return Blocked(request, Cause.NEXT_STEP)
        hit = self._find_prefix(request, step)
        if self._first_chunk(request, hit, step) == 0:
            return Blocked(request, Cause.TOKEN_BUDGET)
        hit, blocked = self._find_room(request, hit, step, now)
        room = self._first_chunk(request, hit, step)
        if blocked is not None or room == 0:
            return blocked or Blocked(request, Cause.TOKEN_BUDGET)
        num_new_tokens = min(room, step.prompt_cap)
        self._queues.start(request, hit, now)
        allocated = self._kv.allocate_slots(request, num_new_tokens)
        assert allocated is not None, "the room just found is gone"
        step.add_new(request, num_new_tokens, self._kv.get_block_ids(request))
        self._leave_rest(request, step, is_capped=num_new_tokens < room)
        return None

    def _find_room(
        self, request: Request, hit: PrefixHit, step: StepPlan, now: float
    ) -> tuple[PrefixHit, Blocked | None]:
        """A row and free blocks for a waiting request, if need be those of running requests that it outranks.

        None is preempted unless that suffices. The victims cannot thrash: they come back after the request, and
        each was outranked by it for good. Returns what the hit has become, too: a victim that goes to the host may
        push some of it out, or be the one whose prompt was to be shared.
        """
        blocked = self._lack(request, hit, step)
        if blocked is not None and blocked.num_blocks and self._queues.kept.drop_blocks():
            hit = self._find_prefix(request, step)
            blocked = self._lack(request, hit, step)
        if blocked is None or not self._outranks_last(request, step):
            return hit, blocked
        outranked = [other for other in self._queues.running if self._outranks(request, other, step)]
        if blocked.num_blocks > sum(map(self._kv.num_held_blocks, outranked)):
            return hit, blocked
        if self._lacks_adapter(request, without=outranked):
            return hit, Blocked(request, Cause.ADAPTER)
        while blocked is not None and self._outranks_last(request, step):
            self._queues.preempt_last(request, now)
            hit = self._find_prefix(request, step)
            blocked = self._lack(request, hit, step)
        return hit, blocked

    def _lack(self, request: Request, hit: PrefixHit, step: StepPlan) -> Blocked | None:
        """What a waiting request lacks: blocks, of which those promised in this step are as good as taken, a row, or a
        place for its adapter.
        """
        num_short = self._kv.num_blocks_short(request, hit) + step.promised_blocks
        if num_short > 0:
            return Blocked(request, Cause.BLOCKS, num_short)
        if len(self._queues.running) >= self._limits.max_num_seqs:
            return Blocked(request, Cause.SEQUENCE_CAP)
        return Blocked(request, Cause.ADAPTER) if self._lacks_adapter(request) else None

    def _lacks_adapter(self, request: Request, without: Collection[Request] = ()) -> bool:
        """Whether running requests, but for some, have as many adapters as may be, and not that of the request."""
        if request.adapter is None:
            return False
        used = self._adapters_in_use(without)
        return request.adapter not in used and len(used) >= self._max_adapters

    def _adapters_in_use(self, without: Collection[Request] = ()) -> set[str]:
        """Those that running requests have, but for some."""
        return {other.adapter for other in self._queues.running if other.adapter and other not in without}

    def _outranks_last(self, request: Request, step: StepPlan) -> bool:
        """Whether the policy lets a waiting request take the place of the last running one."""
        return len(self._queues.running) > 0 and self._outranks(request, self._queues.running.last, step)

    def _outranks(self, request: Request, running: Request, step: StepPlan) -> bool:
        """Whether the policy lets a waiting request take the place of a running one, which has none in the step yet."""
        return (
            step.next_running is not None
            and running.rank >= step.next_running.rank
            and self._queues.policy.outranks(request, running)
        )

    def _leave_rest(self, request: Request, step: StepPlan, *, is_capped: bool) -> None:
        """Keep free what a planned request needs for known tokens that this step did not reach.

        `is_capped` says that there was room for more of them but for `--long-prefill-token-threshold`.
        """
        if is_capped:
            step.capped.add(request)
        if request.num_computed_tokens < request.num_tokens:
            step.promised_blocks += self._kv.num_blocks_to_finish(request)

    def _find_prefix(self, request: Request, step: StepPlan) -> PrefixHit:
        """What a request need not compute: what was swapped out, what its parent has, or what is cached.

        Prompt logprobs need every position to be computed, and sampler state every position that something was sampled
        behind; a request may want nothing of the prefix cache. One that starts over was not swapped out either.
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
        hits = [self._kv.no_hit if is_blind else self._kv.get_computed_blocks(request, most)]
        if parent and self._queues.kept.has_blocks(parent):
            hits.append(self._kv.get_forked_blocks(parent, parent.num_computed_tokens))
        elif (
            parent and parent.status is RequestStatus.RUNNING and step.num_ready_tokens(parent) >= num_tokens
        ):
            hits.append(self._kv.get_forked_blocks(parent, num_tokens))
        return max(hits, key=lambda hit: hit.num_tokens)

    def _budget_to_start(self, step: StepPlan) -> int:
        """What a step can still compute, less a token for each running request that is yet to be planned."""
        return step.budget - self._num_unplanned(step)

    def _first_chunk(self, request: Request, hit: PrefixHit, step: StepPlan) -> int:
        """Tokens of a waiting request to compute now; 0 to wait for a step with more room.

        Without chunked prefill a prompt is computed in one step. Only what exceeds a whole step is split all the
        same: a resumed request may have grown past it and must still come to its end.
        """
        num_missing, budget = request.num_tokens - hit.num_tokens, self._budget_to_start(step)
        if num_missing <= budget:
            return num_missing
        may_split = self._limits.enable_chunked_prefill or num_missing > self._limits.max_num_batched_tokens
        return budget if may_split else 0


def _note_overtaken(request: Request, step: StepPlan) -> None:
    """A request has started that keeps an adapter in use, for whose place others may wait."""
    if request.adapter is not None:
        for other in step.passed_over:
            other.num_overtaken += 1
