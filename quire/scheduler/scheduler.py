"""`Scheduler`: decides what each step computes.

Invariant: pure. Requests, results and the time come in as arguments and plans go out; there is no clock, no
I/O, no randomness and no torch here, so the same events always give the same plans.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from quire.config import EngineConfig
from quire.errors import EngineError, ValidationError
from quire.kv_cache.events import KVCacheEvent
from quire.kv_cache.manager import IntegrityError, KVCacheManager
from quire.kv_cache.spec import KVCacheConfig
from quire.lora_request import name_in
from quire.plugins import import_subclass
from quire.scheduler.explain import Explanation
from quire.scheduler.fair import Fair
from quire.scheduler.forks import make_fork, make_successor
from quire.scheduler.holds import Hold
from quire.scheduler.output import (
    WAIST_VERSION,
    AdapterStats,
    ModelRunnerOutput,
    RequestUpdate,
    SchedulerOutput,
    SchedulerStats,
    SpecDecodingStats,
)
from quire.scheduler.planner import Planner
from quire.scheduler.policies import FCFS, Policy, Priority
from quire.scheduler.queues import RequestQueues
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.rounds import RoundLimit, most_rounds
from quire.scheduler.step import Chunk, StepPlan
from quire.scheduler.stop import Stop, check_stop
from quire.scheduler.updates import last_update, update_of

POLICIES: dict[str, type[Policy]] = {"fcfs": FCFS, "priority": Priority, "fair": Fair}
"""`--scheduling-policy` -> policy."""


class Scheduler:
    """Owns all requests that are not finished, and the KV cache's bookkeeping.

    `schedule` may be called again before the result of its last plan is in. Tokens that steps in flight sample
    count as known: the worker has them when it gets to the plan that computes them. Blocks that are freed
    meanwhile can only be rewritten by a later step. A request that was preempted waits until its steps in flight
    have come back, and surplus results of one that ended are dropped.

    Attributes:
        policy_class: for a subclass (`--scheduler-cls`) to say; None: the one that --scheduling-policy names.
    """

    policy_class: type[Policy] | None = None

    def __init__(self, config: EngineConfig, kv_config: KVCacheConfig) -> None:
        self._max_model_len = config.model.max_model_len
        self._pooling = config.pooling
        self._kv = KVCacheManager(
            kv_config,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            max_chunk=config.scheduler.max_num_batched_tokens,
            preemption_mode=config.cache.preemption_mode,
            enable_events=config.kv_events.enabled or config.tells_cache,
        )
        policy = (self.policy_class or POLICIES[config.scheduler.scheduling_policy])(config.scheduler)
        self._queues = RequestQueues(policy, self._kv)
        self._max_adapters = config.lora.max_loras if config.lora.enable_lora else 0
        limits = config.scheduler
        self._rounds = RoundLimit(most_rounds(limits.num_scheduler_steps, kv_config), limits.max_multi_step_s)
        self._planner = Planner(
            limits,
            self._max_model_len,
            self._kv,
            self._queues,
            self._rounds,
            self._max_adapters,
            config.speculative.settings.num_lookahead_tokens,
            config.num_disjoint_steps,
        )
        self._in_flight: deque[StepPlan] = deque()
        self._num_steps = 0
        self._is_paused = False
        self._spec_decoding = SpecDecodingStats()

    # Events

    def add_request(self, request: Request, now: float, holds: Iterable[Hold] = ()) -> None:
        """Queue a new request; with holds, it is ready to start when all of them are released.

        Raises:
            ValidationError: the id is in use, or the request could not run even with the engine to itself.
        """
        if request.request_id in self._queues.by_id or self._queues.kept.get(request.request_id):
            raise ValidationError(f"request id {request.request_id!r} is in use", param="request_id")
        check_admissible(request, self._max_model_len, self._kv)
        if self._pooling is not None and request.pooling_params is not None:
            request.starts_over = self._pooling.reads_every_token(request.pooling_params)
        if request.fork_of is not None:
            parent, kept = self._queues.by_id.get(request.fork_of), self._queues.kept.get(request.fork_of)
            if parent is not None:
                holds = [*holds, *make_fork(request, parent)]
            elif kept is not None:
                make_successor(request, kept)
        self._queues.arrive(request, now, holds)

    def hold(self, request_id: str, hold: Hold, now: float) -> bool:
        """Let a request wait for one thing more; False, and nothing done, if it is running or unknown."""
        request = self._queues.by_id.get(request_id)
        if request is None or request.status is RequestStatus.RUNNING:
            return False
        self._queues.hold(request, hold, now)
        return True

    def release(self, key: str, now: float) -> None:
        """End all holds with this key, if there are any."""
        self._queues.release(key, now)

    def finish_requests(self, request_ids: Iterable[str], reason: str, now: float) -> list[RequestUpdate]:
        """End these requests, whatever they are doing, and free their blocks; unknown ids are ignored.

        Of one that has ended and is kept, no more forks will come.


        Returns the last update of each request that this call ended.
        """
        by_id, request_ids = self._queues.by_id, list(dict.fromkeys(request_ids))
        found = [by_id[name] for name in request_ids if name in by_id]
        for request in found:
            self._queues.finish(request, reason, now)
        for name in request_ids:
            self._queues.kept.close(name)
        return [last_update(request) for request in found]

    def spent_in_vain(self, request_ids: Iterable[str]) -> dict[str, int]:
        """By tenant, the prompt tokens that were computed for those of these requests that have no token yet.

        What a preemption made be forgotten does not count. Unknown ids are ignored, and whoever has no tenant.
        """
        by_id, spent = self._queues.by_id, dict[str, int]()
        for request in [by_id[name] for name in dict.fromkeys(request_ids) if name in by_id]:
            num_tokens = request.num_computed_tokens - request.num_cached_tokens
            if request.tenant and not request.num_output_tokens and num_tokens > 0:
                spent[request.tenant] = spent.get(request.tenant, 0) + num_tokens
        return spent

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while a request is running."""
        return self._kv.reset_prefix_cache()

    def pause(self, now: float) -> None:
        """Until `resume`, plan nothing but what the worker is to let go of; requests stay where they are."""
        self._is_paused = True
        self._queues.pause(now)

    def forget(self, now: float) -> None:
        """Nothing in the cache is worth anything any more: prefixes are forgotten on both tiers, and requests in flight
        wait for all their tokens to be computed again. Only while paused, with no step in flight.
        """
        assert self._is_paused, "forgetting is for those who sleep"
        assert not self._in_flight, "steps in flight read the cache"
        self._queues.preempt_all(now)
        if not self._kv.reset_prefix_cache():
            raise EngineError("the cache cannot be forgotten: somebody holds blocks that no request has")

    def resume(self, now: float) -> None:
        """Plan as before."""
        self._is_paused = False
        self._queues.resume(now)

    def take_kv_events(self) -> list[KVCacheEvent]:
        """What happened to the prefix cache since the last call; nothing unless events are enabled."""
        return self._kv.take_events()

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
        step = (
            StepPlan(self._num_steps, now, 0, 0)
            if self._is_paused
            else self._planner.plan(self._num_steps, now)
        )
        if not self._is_paused:
            self._queues.note(step, now)
        plan = step.seal(self._queues.take_vacated(), self._kv.take_moves())
        if not plan.is_empty:
            self._in_flight.append(step)
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float
    ) -> list[RequestUpdate]:
        """Take in the result of the oldest step in flight: what was sampled, what ended, what may now be reused.

        Requests that ended while the step ran are passed over, even if a new one has taken the same id.

        Raises:
            EngineError: the worker is of another version than the scheduler.
        """
        if output.version != WAIST_VERSION:
            raise EngineError(
                f"the result of step {plan.step_id} is of version {output.version}, not {WAIST_VERSION}"
            )
        assert plan.step_id == output.step_id, "steps are out of order"
        step = self._take_from_flight(plan.step_id)
        updates = [
            self._apply(chunk, output, now, step.max_rounds)
            for chunk in step.chunks
            if not chunk.request.is_finished
        ]
        self._rounds.note(step, output, now)
        return [update for update in updates if update is not None]

    # State

    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._queues.by_id)

    def has_work(self) -> bool:
        """Whether there are requests to run, rows for the worker to free, or results to come.

        There is nothing to do for requests that are held: a release comes from outside, or from a step.
        """
        waits = self._queues.has_vacated if self._is_paused else self._queues.has_work
        return waits or bool(self._in_flight)

    def stats(self) -> SchedulerStats:
        """Counts and totals, as of now."""
        return SchedulerStats(
            num_running=len(self._queues.running),
            num_waiting=self._queues.num_waiting,
            kv_cache_usage=self._kv.usage,
            num_preemptions=self._queues.num_preemptions,
            prefix_cache_queries=self._kv.prefix_queries,
            prefix_cache_hits=self._kv.prefix_hits,
            num_swaps=self._kv.num_swaps,
            host_cache_usage=self._kv.host_usage,
            num_held=self._queues.num_held,
            spec_decoding=self._spec_decoding.copy() if self._spec_decoding.num_drafts else None,
            adapters=self._adapter_stats() if self._max_adapters else None,
        )

    def _adapter_stats(self) -> AdapterStats:
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for request in self._queues.by_id.values():
            if request.adapter is not None:
                names[request.status is RequestStatus.RUNNING].add(name_in(request.adapter))
        return AdapterStats(sorted(names[True]), sorted(names[False]), self._max_adapters)

    def request_ids(self) -> list[str]:
        """Of the requests that have not ended, oldest first."""
        return list(self._queues.by_id)

    def adapted(self) -> dict[str, list[str]]:
        """By adapter, the requests that have it and have not ended."""
        found: dict[str, list[str]] = {}
        for request in self._queues.by_id.values():
            if request.adapter is not None:
                found.setdefault(request.adapter, []).append(request.request_id)
        return found

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """Why a request waits or waited; None if it is unknown or ended too long ago."""
        return self._queues.explain(request_id, now)

    def check_integrity(self) -> None:
        """Check that the queues agree with the requests, and every invariant of the KV cache.

        Raises:
            IntegrityError: a bug of ours; holds the state.
        """
        self._kv.check_integrity()
        self._queues.check_integrity()
        in_flight = Counter(chunk.request for step in self._in_flight for chunk in step.chunks)
        for request in self._queues.by_id.values():
            if request.num_steps_in_flight != in_flight[request]:
                state = {"requests": self._queues.by_id, "in flight": in_flight}
                raise IntegrityError(f"{request!r} miscounts its steps in flight", state)

    # Results

    def _take_from_flight(self, step_id: int) -> StepPlan:
        """The step whose result is in; one that was interrupted never has a result, nor any request left."""
        while self._in_flight:
            step = self._in_flight.popleft()
            if step.step_id == step_id:
                return step
            assert all(chunk.request.is_finished for chunk in step.chunks), "steps are out of order"
        raise AssertionError("a result came for no step")

    def _apply(
        self, chunk: Chunk, output: ModelRunnerOutput, now: float, max_rounds: int
    ) -> RequestUpdate | None:
        """What one request's share of a step's result means for it; None if there is nothing to tell."""
        request, request_id = chunk.request, chunk.request.request_id
        request.settle(chunk.num_samples)
        error = output.failed.get(request_id)
        if error is not None:
            self._kv.disown(request)
            self._queues.finish(request, "error", now)
            return last_update(request, error)
        sampled = output.sampled_token_ids.get(request_id, [])
        count, planned = len(sampled), chunk.num_samples * max_rounds
        assert count == planned or 0 < count < planned, f"{request!r}: {sampled} for {planned} samples"
        new_token_ids, stop = self._append(request, sampled)
        if planned == 0 and chunk.pools:
            assert request_id in output.pooled, f"{request!r} was planned to pool, and has nothing"
            stop = "stop", None
        num_further = min(output.num_accepted(request_id), len(new_token_ids))
        if max_rounds > 1:
            self._queues.policy.charge([chunk] * num_further)  # the first was when it was planned
        if output.draft_token_ids or request.draft_token_ids:
            request.update_drafts(new_token_ids, output.draft_token_ids.get(request_id))
        if request.status is RequestStatus.RUNNING:  # else it was preempted since, and its blocks are gone
            end = chunk.end
            if planned > 1 and (self._kv.rolls_back or not chunk.num_drafts):
                end += num_further
                request.num_computed_tokens = end
            self._kv.cache_blocks(request, end)
        if stop is not None:
            self._queues.finish(request, stop[0], now, keeps=request.num_beams > 0)
        elif new_token_ids:
            self._queues.release(request, now)
        if chunk.num_drafts:
            self._spec_decoding.note(chunk.num_drafts, num_further)
        return update_of(chunk, output, new_token_ids, stop and stop[1])

    def _append(self, request: Request, sampled: list[int]) -> tuple[list[int], Stop | None]:
        """Add sampled tokens up to the one that ends the request; returns those added and why they are the last."""
        for count, token_id in enumerate(sampled, 1):
            request.token_ids.append(token_id)
            stop = check_stop(request, self._max_model_len)
            if stop is not None:
                return sampled[:count], stop
        return sampled, None


def check_admissible(request: Request, max_model_len: int, kv: KVCacheManager) -> None:
    """Check a request against the model's context and the size of the KV cache.

    Raises:
        ValidationError: with the request's numbers and the limit.
    """
    pools, num_prompt_tokens = request.pooling_params is not None, request.num_prompt_tokens
    if not 0 < num_prompt_tokens < max_model_len + pools:
        raise ValidationError(
            f"the prompt has {num_prompt_tokens} tokens; it must have at least 1 and "
            f"{'fit' if pools else 'leave room for one more in'} the model's context of {max_model_len}",
            param="prompt",
        )
    num_tokens = request.max_computed_tokens(max_model_len)
    needed = kv.max_blocks(num_tokens)
    if needed > kv.num_usable_blocks:
        raise ValidationError(
            f"the request may need {num_tokens} tokens in the KV cache ({num_prompt_tokens} of prompt), which take "
            f"{needed} blocks of {kv.block_size} tokens; the cache has {kv.num_usable_blocks}",
            param="prompt" if pools else "max_tokens",
        )


def resolve_scheduler(name: str) -> type[Scheduler]:
    """The class that `module:Class` names; the built-in one for an empty name.

    Raises:
        ConfigError: there is no such class, or it is no subclass of `Scheduler`.
    """
    if not name:
        return Scheduler
    found: type[Scheduler] = import_subclass(name, Scheduler, "--scheduler-cls")
    return found
