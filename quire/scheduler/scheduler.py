"""`Scheduler`: decides what each step computes.

Invariant: pure. Requests, results and the time come in as arguments and plans go out; there is no clock, no
I/O, no randomness and no torch here, so the same events always give the same plans.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.kv_cache.manager import IntegrityError, KVCacheManager, PrefixHit
from quire.kv_cache.spec import KVCacheConfig
from quire.scheduler.admission import check_admissible
from quire.scheduler.explain import Cause, Explanation
from quire.scheduler.fair import Fair
from quire.scheduler.forks import HeldForks
from quire.scheduler.output import (
    BlockIds,
    ModelRunnerOutput,
    RequestUpdate,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from quire.scheduler.policies import FCFS, Policy, Priority
from quire.scheduler.queues import RankedRequests
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.step import Blocked, Chunk, StepPlan
from quire.scheduler.stop import check_stop
from quire.scheduler.wait_account import WaitAccount

POLICIES: dict[str, type[Policy]] = {"fcfs": FCFS, "priority": Priority, "fair": Fair}
"""`--scheduling-policy` -> policy."""


class Scheduler:
    """Owns all requests that are not finished, and the KV cache's bookkeeping.

    Running requests are kept in the order of their ranks, which the policy gives. That order is also the order of
    planning, and preemption takes from its end, so a request that has its place in the plan never loses it again.

    `schedule` may be called again before the result of its last plan is in. Tokens that steps in flight sample
    count as known: the worker has them when it gets to the plan that computes them. Blocks that are freed
    meanwhile can only be rewritten by a later step. A request that was preempted waits until its steps in flight
    have come back, and surplus results of one that ended are dropped.

    Attributes:
        policy_class: for a subclass (`--scheduler-cls`) to say; None: the one that --scheduling-policy names.
    """

    policy_class: type[Policy] | None = None

    def __init__(self, config: EngineConfig, kv_config: KVCacheConfig) -> None:
        self._limits = config.scheduler
        self._max_model_len = config.model.max_model_len
        self._kv = KVCacheManager(
            kv_config,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            max_chunk=config.scheduler.max_num_batched_tokens,
            preemption_mode=config.cache.preemption_mode,
        )
        self._requests: dict[str, Request] = {}
        self._running = RankedRequests()
        self._policy = (self.policy_class or POLICIES[config.scheduler.scheduling_policy])(config.scheduler)
        self._forks = HeldForks()
        self._waits = WaitAccount(self._policy.overtaken)
        self._removed_request_ids: list[str] = []
        self._in_flight: deque[StepPlan] = deque()
        self._num_requests = 0
        self._num_steps = 0
        self._num_preemptions = 0

    # Events

    def add_request(self, request: Request, now: float) -> None:
        """Queue a new request.

        Raises:
            ValidationError: the id is in use, or the request could not run even with the engine to itself.
        """
        if request.request_id in self._requests:
            raise ValidationError(f"request id {request.request_id!r} is in use", param="request_id")
        check_admissible(request, self._max_model_len, self._kv)
        parent = self._requests.get(request.fork_of) if request.fork_of is not None else None
        held = parent is not None and self._forks.hold(request, parent)
        self._num_requests += 1
        request.queued_ts, request.number = now, self._num_requests
        self._requests[request.request_id] = request
        if held:
            request.wait.enter(Cause.SHARED_PROMPT, now)
        else:
            self._queue(request, now)

    def finish_requests(self, request_ids: Iterable[str], reason: str, now: float) -> list[RequestUpdate]:
        """End these requests, whatever they are doing, and free their blocks; unknown ids are ignored.

        Returns the last update of each request that this call ended.
        """
        found = [self._requests[name] for name in dict.fromkeys(request_ids) if name in self._requests]
        for request in found:
            self._finish(request, reason, now)
        return [self._update(request, []) for request in found]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while a request is running."""
        return self._kv.reset_prefix_cache()

    # The step

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step; an empty plan is not to be executed.

        There is no prefill phase and no decode phase. A request has a number of known tokens and a number of
        computed tokens, and each step lets the second catch up with the first, within the step's token
        budget: by many tokens for a prompt, by part of them if the budget is short, by what the prefix
        cache lacks, by everything after a preemption, and by one for a request that only waits for its own
        last token. Running requests go first, in order; then waiting ones start while budget, rows and
        blocks last. A prompt leaves one token of the budget to each request that runs after it, so those that
        generate never stand still for it.
        """
        self._num_steps += 1
        step = StepPlan(self._num_steps, self._limits.max_num_batched_tokens, self._prompt_cap())
        self._plan_running(step, now)
        self._start_waiting(step, now)
        self._policy.charge(step.chunks)
        self._waits.plan(step.blocked, now)
        removed, self._removed_request_ids = self._removed_request_ids, []
        plan = step.seal(removed, self._kv.take_moves())
        if not plan.is_empty:
            self._in_flight.append(step)
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float
    ) -> list[RequestUpdate]:
        """Take in the result of the oldest step in flight: what was sampled, what ended, what may now be reused.

        Requests that ended while the step ran are passed over, even if a new one has taken the same id.
        """
        assert plan.step_id == output.step_id, "steps are out of order"
        step = self._take_from_flight(plan.step_id)
        updates = [self._apply(chunk, output, now) for chunk in step.chunks if not chunk.request.is_finished]
        return [update for update in updates if update is not None]

    # State

    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def has_work(self) -> bool:
        """Whether there are requests to run, rows for the worker to free, or results to come."""
        return bool(self._requests or self._removed_request_ids or self._in_flight)

    def stats(self) -> SchedulerStats:
        """Counts and totals, as of now."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._policy) + len(self._forks),
            kv_cache_usage=self._kv.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._kv.prefix_queries,
            prefix_cache_hits=self._kv.prefix_hits,
            num_swaps=self._kv.num_swaps,
            host_cache_usage=self._kv.host_usage,
        )

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """Why a request waits or waited; None if it is unknown or ended too long ago."""
        if request_id in self._requests:
            return self._waits.explain(self._requests[request_id], self._policy, now)
        return self._waits.explain_ended(request_id)

    def check_integrity(self) -> None:
        """Check that the queues agree with the requests, and every invariant of the KV cache.

        Raises:
            IntegrityError: a bug of ours; holds the state.
        """
        self._kv.check_integrity()
        running = [request.request_id for request in self._running]
        waiting = [request.request_id for request in (*self._policy, *self._forks)]
        state = {"requests": self._requests, "running": running, "waiting": waiting}
        num_waiting = len(self._policy) + len(self._forks)
        if sorted([*running, *waiting]) != sorted(self._requests) or len(waiting) != num_waiting:
            raise IntegrityError("a request is in no queue, or in two", state)
        expected = {r.request_id for r in self._requests.values() if r.status is RequestStatus.RUNNING}
        if expected != set(running) or expected != self._kv.holders():
            raise IntegrityError("running requests and holders of blocks differ", state)
        if not self._kv.swapped() <= self._requests.keys() - running:
            raise IntegrityError("a swapped request is running or unknown", state)
        in_flight = Counter(chunk.request for step in self._in_flight for chunk in step.chunks)
        for request in self._requests.values():
            if request.num_steps_in_flight != in_flight[request]:
                raise IntegrityError(f"{request!r} miscounts its steps in flight", state)

    # Planning

    def _prompt_cap(self) -> int:
        """Most tokens of one prompt in the next step; limited only while somebody generates."""
        cap = self._limits.long_prefill_token_threshold
        if cap and any(request.num_missing_tokens(self._max_model_len) == 1 for request in self._running):
            return cap
        return self._limits.max_num_batched_tokens

    def _plan_running(self, step: StepPlan, now: float) -> None:
        """Let running requests catch up, the first ones at the cost of the last if blocks are short."""
        preempts = self._policy.preempts
        for request in list(self._running):
            if preempts and request.status is RequestStatus.RUNNING:
                self._start_waiting(step, now, before=request)
            if step.budget == 0 or request.status is not RequestStatus.RUNNING:
                break
            num_missing = num_new_tokens = request.num_missing_tokens(self._max_model_len)
            if num_missing == 0:  # all that it may still have is in flight
                step.num_satisfied += 1
                continue
            if num_new_tokens > 1 or request.wait.cause is not None:
                num_new_tokens = min(num_new_tokens, max(step.budget - self._num_unplanned(step) + 1, 1))
                num_new_tokens = self._cap_prompt(request, num_new_tokens, step, now)
            new_block_ids = self._allocate_or_preempt(request, num_new_tokens, now)
            if new_block_ids is not None:
                step.add_cached(request, num_new_tokens, new_block_ids)
                if num_new_tokens < num_missing:
                    self._promise_blocks(request, step)

    def _num_unplanned(self, step: StepPlan) -> int:
        """Running requests that have yet to get their tokens of a step, of which each will want one."""
        return len(self._running) - len(step.chunks) - step.num_satisfied

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int, now: float) -> BlockIds | None:
        """Blocks for a running request, taken from the last ones if need be; None if it was itself the last.

        The first running request always gets what it needs: alone, it fits (see `check_admissible`). So every
        step advances somebody, unless steps in flight already do, and nobody waits for ever.
        """
        while request.status is RequestStatus.RUNNING:
            block_ids = self._kv.allocate_slots(request, num_new_tokens)
            if block_ids is not None:
                return block_ids
            self._preempt_last(request, now)
        return None

    def _preempt_last(self, by: Request, now: float) -> None:
        """Take the blocks of the running request of highest rank; it keeps its tokens, to be computed again.

        If its blocks are swapped out, it returns as it was.
        """
        victim = self._running.last
        self._running.remove(victim)
        self._kv.preempt(victim)
        victim.preempt()
        victim.wait.enter(Cause.PREEMPTED, now, "lack of blocks" if by is victim else by.request_id)
        self._policy.put_back(victim)
        self._removed_request_ids.append(victim.request_id)
        self._num_preemptions += 1

    def _start_waiting(self, step: StepPlan, now: float, before: Request | None = None) -> None:
        """Start waiting requests, strictly in the policy's order, until one does not fit.

        With `before`, only those that outrank this running request, which is planned next.
        """
        while step.blocked is None and len(self._policy):
            first = self._policy.peek()
            if before is not None and first.rank >= before.rank:
                break
            step.blocked = self._start(first, step, now)

    def _start(self, request: Request, step: StepPlan, now: float) -> Blocked | None:
        """Start or resume a request if a first chunk fits the budget and all known tokens fit the cache.

        Asking for room for all tokens, not only the chunk's, keeps a preempted request from coming back just
        to be preempted again. It comes back with all its tokens, so those in flight must be in.
        """
        if request.num_steps_in_flight:
            return Blocked(request, Cause.NEXT_STEP)
        if self._budget_to_start(step) <= 0:
            return Blocked(request, Cause.TOKEN_BUDGET)
        if len(self._running) >= self._limits.max_num_seqs and not self._outranks_last(request):
            return Blocked(request, Cause.SEQUENCE_CAP)
        hit = self._find_prefix(request, step)
        if self._first_chunk(request, hit, step) == 0:
            return Blocked(request, Cause.TOKEN_BUDGET)
        hit, blocked = self._find_room(request, hit, step, now)
        num_new_tokens = self._first_chunk(request, hit, step)
        if blocked is not None or num_new_tokens == 0:
            return blocked or Blocked(request, Cause.TOKEN_BUDGET)
        num_new_tokens = self._cap_prompt(request, num_new_tokens, step, now)
        self._run(request, hit, now)
        allocated = self._kv.allocate_slots(request, num_new_tokens)
        assert allocated is not None, "the room just found is gone"
        step.add_new(request, num_new_tokens, self._kv.get_block_ids(request))
        self._promise_blocks(request, step)
        return None

    def _run(self, request: Request, hit: PrefixHit, now: float) -> None:
        """Move a request from the waiting ones to the running ones."""
        self._policy.start(request, hit.num_tokens)
        if request.status is RequestStatus.WAITING:
            self._waits.start(request, now)
        self._running.add(request)
        request.start(now, hit.num_tokens)
        self._kv.start(request, hit)

    def _find_room(
        self, request: Request, hit: PrefixHit, step: StepPlan, now: float
    ) -> tuple[PrefixHit, Blocked | None]:
        """A row and free blocks for a waiting request, if need be those of running requests that it outranks.

        None is preempted unless that suffices. The victims cannot thrash: they come back after the request, and
        each was outranked by it for good. Returns what the hit has become, too: a victim that goes to the host may
        push some of it out, or be the one whose prompt was to be shared.
        """
        blocked = self._lack(request, hit, step)
        if blocked is None or not self._outranks_last(request):
            return hit, blocked
        outranked = [other for other in self._running if other.rank > request.rank]
        if blocked.num_blocks > sum(map(self._kv.num_held_blocks, outranked)):
            return hit, blocked
        while blocked is not None and self._outranks_last(request):
            self._preempt_last(request, now)
            hit = self._find_prefix(request, step)
            blocked = self._lack(request, hit, step)
        return hit, blocked

    def _lack(self, request: Request, hit: PrefixHit, step: StepPlan) -> Blocked | None:
        """Which of a row and blocks a waiting request lacks; blocks promised in this step are as good as taken."""
        num_short = self._kv.num_blocks_short(request, hit) + step.promised_blocks
        if num_short > 0:
            return Blocked(request, Cause.BLOCKS, num_short)
        if len(self._running) >= self._limits.max_num_seqs:
            return Blocked(request, Cause.SEQUENCE_CAP)
        return None

    def _outranks_last(self, request: Request) -> bool:
        """Whether the policy lets a waiting request take the place of the last running one."""
        return self._policy.preempts and len(self._running) > 0 and request.rank < self._running.last.rank

    def _promise_blocks(self, request: Request, step: StepPlan) -> None:
        """Keep free what a planned request needs for known tokens that this step did not reach."""
        if request.num_computed_tokens < request.num_tokens:
            step.promised_blocks += self._kv.num_blocks_to_finish(request)

    def _cap_prompt(self, request: Request, num_new_tokens: int, step: StepPlan, now: float) -> int:
        """Cut a chunk to `--long-prefill-token-threshold`, which the request is told about."""
        capped = num_new_tokens > step.prompt_cap
        request.wait.enter(Cause.LONG_PREFILL_CAP if capped else None, now)
        return min(num_new_tokens, step.prompt_cap)

    def _find_prefix(self, request: Request, step: StepPlan) -> PrefixHit:
        """What a request need not compute: what was swapped out, what its parent has, or what is cached.

        Prompt logprobs need every position to be computed.
        """
        swapped = self._kv.get_swapped_blocks(request)
        if swapped is not None:
            return swapped
        if request.sampling_params.prompt_logprobs is not None:
            return self._kv.no_hit
        hits = [self._kv.get_computed_blocks(request)]
        parent, num_tokens = request.parent, request.num_prompt_tokens - 1
        if parent and parent.status is RequestStatus.RUNNING and step.num_ready_tokens(parent) >= num_tokens:
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

    # Results

    def _take_from_flight(self, step_id: int) -> StepPlan:
        """The step whose result is in; one that was interrupted never has a result, nor any request left."""
        while self._in_flight:
            step = self._in_flight.popleft()
            if step.step_id == step_id:
                return step
            assert all(chunk.request.is_finished for chunk in step.chunks), "steps are out of order"
        raise AssertionError("a result came for no step")

    def _apply(self, chunk: Chunk, output: ModelRunnerOutput, now: float) -> RequestUpdate | None:
        """What one request's share of a step's result means for it; None if there is nothing to tell."""
        request, request_id = chunk.request, chunk.request.request_id
        request.settle(chunk.samples)
        error = output.failed.get(request_id)
        if error is not None:
            self._finish(request, "error", now)
            return self._update(request, [], error=error)
        if request.status is RequestStatus.RUNNING:  # else it was preempted since, and its blocks are gone
            self._kv.cache_blocks(request, chunk.end)
        sampled = output.sampled_token_ids.get(request_id, [])
        assert bool(sampled) == chunk.samples, f"{request!r} sampled {sampled}"
        new_token_ids, stop_reason = self._append(request, sampled, now)
        if new_token_ids:
            self._release_forks(request, now)
        prompt_logprobs = _unreported(chunk, output.prompt_logprobs.get(request_id))
        if not new_token_ids and not prompt_logprobs:
            return None
        return self._update(
            request,
            new_token_ids,
            stop_reason=stop_reason,
            logprobs=_first(output.logprobs.get(request_id), len(new_token_ids)),
            prompt_logprobs=prompt_logprobs,
        )

    def _append(self, request: Request, sampled: list[int], now: float) -> tuple[list[int], int | None]:
        """Add sampled tokens up to the one that ends the request; returns those added and the stop reason."""
        for count, token_id in enumerate(sampled, 1):
            request.token_ids.append(token_id)
            stop = check_stop(request, self._max_model_len)
            if stop is not None:
                self._finish(request, stop[0], now)
                return sampled[:count], stop[1]
        return sampled, None

    def _finish(self, request: Request, reason: str, now: float) -> None:
        """The one way out: whatever the reason and the state, everything the request holds is released."""
        status = request.status
        if not request.finish(reason):
            return
        if status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._removed_request_ids.append(request.request_id)
            self._policy.finish(request)
        elif not self._forks.discard(request):
            self._policy.remove(request)
            self._policy.finish(request)
        self._release_forks(request, now)
        del self._requests[request.request_id]
        self._waits.end(request, now)
        self._kv.free(request)

    def _queue(self, request: Request, now: float) -> None:
        self._policy.add(request)
        self._waits.arrive(request, now)

    def _release_forks(self, parent: Request, now: float) -> None:
        """Queue the children of a request, at the places that their arrival gives them."""
        for child in self._forks.release(parent):
            self._queue(child, now)

    def _update(
        self,
        request: Request,
        new_token_ids: list[int],
        *,
        stop_reason: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> RequestUpdate:
        """Report on a request; its history goes with its first and its last report only."""
        update = RequestUpdate(
            request.request_id, new_token_ids, request.finish_reason, stop_reason, logprobs, prompt_logprobs
        )
        update.error = error
        if not request.reported or request.is_finished:
            update.num_cached_tokens = request.num_cached_tokens
            update.queued_ts, update.scheduled_ts = request.queued_ts, request.scheduled_ts
            update.num_preemptions = request.num_preemptions
            request.reported = True
        return update


def _first(logprobs: list[TokenLogprobs] | None, num_tokens: int) -> list[TokenLogprobs] | None:
    return None if logprobs is None else logprobs[:num_tokens]


def _unreported(chunk: Chunk, logprobs: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    """Prompt logprobs of a chunk, less those reported before a preemption made it be computed again."""
    if logprobs is None:
        return None
    request = chunk.request
    unreported = logprobs[max(request.num_prompt_logprobs - chunk.start, 0) :]
    request.num_prompt_logprobs += len(unreported)
    return unreported or None
