# SPDX-License-Identifier: Apache-2.0
"""Scheduler: decides what each step computes.

Invariant: pure. Requests, results and the time come in as arguments and plans go out. There is no clock, no
I/O, no randomness and no torch here, so the same events always give the same plans.

`check_stop` is a pure function of tokens and parameters; stop strings are left to the front end, which has the text.

Invariant of updates: nothing is reported twice, even if it is computed twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from msgspec import structs

from quire.adapters import name_in
from quire.config import EngineConfig, SchedulerConfig
from quire.errors import EngineError, ValidationError
from quire.kv_cache.events import KVCacheEvent
from quire.kv_cache.manager import IntegrityError, KVCacheManager
from quire.kv_cache.spec import KVCacheConfig
from quire.media import check_media
from quire.plugins import import_subclass
from quire.sampling_extras import RepetitionDetectionParams
from quire.scheduler.beams import Beams
from quire.scheduler.explain import Explanation
from quire.scheduler.fair import Fair
from quire.scheduler.feature_stats import AdapterStats, SpecDecodingStats
from quire.scheduler.forks import make_fork
from quire.scheduler.holds import Hold
from quire.scheduler.load_signals import LoadSignals
from quire.scheduler.mixed_steps import MixedStepLimit
from quire.scheduler.output import (
    STEP_PROTOCOL_VERSION,
    ModelRunnerOutput,
    RequestUpdate,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from quire.scheduler.planner import Planner
from quire.scheduler.policies import FCFS, Policy, Priority
from quire.scheduler.queues import RequestQueues
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.rounds import RoundLimit, most_rounds
from quire.scheduler.step import Chunk, StepPlan
from quire.scheduler.store_access import StoreAccess

Stop = tuple[str, int | None]  # (finish reason, stop reason)


def check_stop(request: Request, max_model_len: int) -> Stop | None:
    """Return the reasons if the last token finishes the request, else None.

    A stop token takes precedence over a length limit reached with it, and that over a repetition. The stop reason is
    the id of a token in `stop_token_ids`, else None.
    """
    params, num_output_tokens = request.sampling_params, request.num_output_tokens
    if num_output_tokens and num_output_tokens >= params.min_tokens:
        last = request.token_ids[-1]
        if not params.ignore_eos and last in request.eos_token_ids:
            return "stop", None
        if last in params.stop_token_ids:
            return "stop", last
    if request.num_tokens >= max_model_len:
        return "length", None
    if params.max_tokens is not None and num_output_tokens >= params.max_tokens:
        return "length", None
    repetition = params.repetition_detection
    if repetition is not None and num_output_tokens >= params.min_tokens and _repeats(request, repetition):
        return "repetition", None
    return None


def _repeats(request: Request, detection: RepetitionDetectionParams) -> bool:
    """Return whether the output ends in `min_count` repetitions of one pattern.

    The longest relevant tail is copied and compared with itself shifted by each pattern size.
    """
    longest = detection.max_pattern_size * detection.min_count
    tail = request.token_ids[max(request.num_prompt_tokens, request.num_tokens - longest) :]
    last = len(tail) - 1
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        start = len(tail) - size * detection.min_count
        if start < 0:
            return False
        if tail[last - size] == tail[last] and tail[start + size :] == tail[start:-size]:
            return True
    return False


def last_update(request: Request, error: str | None = None) -> RequestUpdate:
    """Return the last update of a request that was finished from outside or by an error."""
    update = _update(request, [])
    update.error = error
    return update


def update_of(
    chunk: Chunk, output: ModelRunnerOutput, new_token_ids: list[int], stop_reason: int | None
) -> RequestUpdate | None:
    """Return the update for a request's chunk of a step; None if there is nothing to report."""
    request_id = chunk.request.request_id
    prompt_logprobs = _unreported(chunk, output.prompt_logprobs.get(request_id))
    if not (new_token_ids or prompt_logprobs or request_id in output.pooled):
        return None
    logprobs = output.logprobs.get(request_id)
    update = _update(
        chunk.request,
        new_token_ids,
        stop_reason,
        None if logprobs is None else logprobs[: len(new_token_ids)],
        prompt_logprobs,
    )
    if chunk.num_drafts:
        update.num_draft_tokens = chunk.num_drafts
        update.num_accepted_tokens = min(output.num_accepted(request_id), len(new_token_ids))
    if output.pooled:
        update.pooled = output.pooled.get(request_id)
    return update


def _update(
    request: Request,
    new_token_ids: list[int],
    stop_reason: int | None = None,
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
) -> RequestUpdate:
    """Build an update; timestamps and counters are in the first and the last update only."""
    update = RequestUpdate(
        request.request_id, new_token_ids, request.finish_reason, stop_reason, logprobs, prompt_logprobs
    )
    if not request.reported or request.is_finished:
        update.num_cached_tokens = request.num_cached_tokens
        update.queued_ts, update.scheduled_ts = request.queued_ts, request.scheduled_ts
        update.num_preemptions = request.num_preemptions
        request.reported = True
    return update


def _unreported(chunk: Chunk, logprobs: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    """Return the chunk's prompt logprobs without those reported before a preemption."""
    if logprobs is None:
        return None
    request = chunk.request
    unreported = logprobs[max(request.num_prompt_logprobs - chunk.start, 0) :]
    request.num_prompt_logprobs += len(unreported)
    return unreported or None


StepObserver = Callable[[StepPlan, SchedulerOutput, ModelRunnerOutput, float], None]
"""Receives each step with its plan, its result and the time of the result; changes nothing."""

# --scheduling-policy -> policy
POLICIES: dict[str, type[Policy]] = {"fcfs": FCFS, "priority": Priority, "fair": Fair}


class Scheduler(StoreAccess):
    """Owner of all unfinished requests and of the KV cache's bookkeeping.

    `schedule` may be called again before the result of its last plan is in. Tokens that steps in flight sample
    count as known: the worker has them when it gets to the plan that computes them. Blocks that are freed
    meanwhile can only be rewritten by a later step. A preempted request waits until its steps in flight
    have come back, and surplus results of a finished one are dropped.

    Attributes:
        policy_class: set by a subclass (`--scheduler-cls`); None: as --scheduling-policy says.
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
        self._max_adapters = config.max_adapters
        limits = self._limits = config.scheduler
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._rounds = RoundLimit(most_rounds(limits.num_scheduler_steps, kv_config), limits.max_multi_step_s)
        self._mixed = MixedStepLimit(limits.max_num_batched_tokens, limits.max_mixed_step_s or 0.0)
        self._planner = Planner(
            limits,
            self._max_model_len,
            self._kv,
            self._queues,
            self._rounds,
            self._mixed,
            self._max_adapters,
            config.speculative.settings.num_lookahead_tokens,
            config.num_disjoint_steps,
        )
        self._computed_tokens_per_s = kv_config.swap_costs.computed_tokens_per_s
        self._signals = LoadSignals(limits)
        self._in_flight: deque[StepPlan] = deque()
        self._num_steps = 0
        self._is_paused = False
        self._spec_decoding = SpecDecodingStats()
        self._observer: StepObserver | None = None

    # Events

    def add_request(self, request: Request, now: float, holds: Iterable[Hold] = ()) -> None:
        """Queue a new request; with holds, it is ready to start when all of them are released.

        Raises:
            ValidationError: the id is in use, or the request cannot run even alone, or its media are malformed.
        """
        if request.request_id in self._queues.by_id:
            raise ValidationError(f"request id {request.request_id!r} is in use", param="request_id")
        check_admissible(request, self._max_model_len, self._kv)
        if request.beams is not None:
            check_search(request, self._limits, self._kv, self._max_model_len)
        if request.media:
            check_media(request.media, request.num_prompt_tokens, self._max_num_batched_tokens)
        if self._pooling is not None and request.pooling_params is not None:
            request.starts_over = self._pooling.reads_every_token(request.pooling_params)
        if request.fork_of is not None:
            parent = self._queues.by_id.get(request.fork_of)
            if parent is not None:
                holds = [*holds, *make_fork(request, parent)]
        self._queues.arrive(request, now, holds)

    def hold(self, request_id: str, hold: Hold, now: float) -> bool:
        """Add a hold to a waiting request; False if it is running or unknown."""
        request = self._queues.by_id.get(request_id)
        if request is None or request.status is RequestStatus.RUNNING:
            return False
        self._queues.hold(request, hold, now)
        return True

    def release(self, key: str, now: float) -> None:
        """Release all holds with this key, if there are any."""
        self._queues.release(key, now)

    def finish_requests(self, request_ids: Iterable[str], reason: str, now: float) -> list[RequestUpdate]:
        """Finish requests in any state and free their blocks; unknown ids are ignored.

        Returns the last update of each request that this call finished.
        """
        by_id, request_ids = self._queues.by_id, list(dict.fromkeys(request_ids))
        found = [by_id[name] for name in request_ids if name in by_id]
        for request in found:
            self._queues.finish(request, reason, now)
        return [last_update(request) for request in found]

    def wasted_prompt_tokens(self, request_ids: Iterable[str]) -> dict[str, int]:
        """Return, by tenant, the computed prompt tokens of those requests that have no output token yet.

        Tokens discarded by a preemption, unknown ids and requests without a tenant do not count.
        """
        by_id, spent = self._queues.by_id, dict[str, int]()
        for request in [by_id[name] for name in dict.fromkeys(request_ids) if name in by_id]:
            num_tokens = request.num_computed_tokens - request.num_cached_tokens
            if request.tenant and not request.num_output_tokens and num_tokens > 0:
                spent[request.tenant] = spent.get(request.tenant, 0) + num_tokens
        return spent

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; False, and nothing done, while a request is running."""
        return self._kv.reset_prefix_cache()

    def pause(self, now: float) -> None:
        """Pause until `resume`: plan only the freeing of worker rows; requests stay where they are."""
        self._is_paused = True
        self._queues.pause(now)

    def forget(self, now: float) -> None:
        """Discard all cached content on both tiers; running requests wait for recomputation of all their tokens.

        Requires a paused scheduler without steps in flight.
        """
        assert self._is_paused, "forget() requires a paused scheduler"
        assert not self._in_flight, "steps in flight read the cache"
        self._queues.preempt_all(now)
        if not self._kv.reset_prefix_cache():
            raise EngineError("cannot reset the KV cache: blocks are still referenced by no known request")

    def mix(self, now: float) -> None:
        """Discard all cached content, but let requests go on with what they have computed, for the sake of speed.

        Their later blocks depend on old weights and on new ones, and are never found by others. Requires a paused
        scheduler without steps in flight.
        """
        assert self._is_paused, "mix() requires a paused scheduler"
        assert not self._in_flight, "steps in flight read the cache"
        self._queues.renew_rows(now)
        self._kv.mix()

    def resume(self, now: float) -> None:
        self._is_paused = False
        self._queues.resume(now)

    def is_unfinished(self, request_id: str) -> bool:
        """Return whether a request is waiting or running."""
        return request_id in self._queues.by_id

    @property
    def has_moves(self) -> bool:
        """True if the next plan must copy blocks."""
        return self._kv.has_moves

    @property
    def num_steps(self) -> int:
        """Step id of the last plan."""
        return self._num_steps

    @property
    def num_steps_done(self) -> int:
        """Step id up to which all plans have returned."""
        return self._in_flight[0].step_id - 1 if self._in_flight else self._num_steps

    def pop_kv_events(self) -> list[KVCacheEvent]:
        """Return prefix cache events since the last call; empty unless events are enabled."""
        return self._kv.pop_events()

    # The step

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step; an empty plan is not to be executed.

        There is no prefill phase and no decode phase. A request has a number of known tokens and a number of computed
        tokens, and each step lets the second catch up with the first, within the step's token budget: by many tokens
        for a prompt, by part of them if the budget is short, by what the prefix cache lacks, by everything after a
        preemption, and by one while decoding. Running requests go first, in order; then waiting ones start while
        budget, rows and blocks last. A prompt leaves one token of the budget to each request that runs after it, so
        prefills never stall decodes.
        """
        self._num_steps += 1
        step = (
            StepPlan(self._num_steps, now, 0, 0, 0)
            if self._is_paused
            else self._planner.plan(self._num_steps, now)
        )
        if not self._is_paused:
            self._queues.note(step, now)
        plan = step.seal(self._queues.pop_vacated_ids(), self._kv.pop_moves())
        self._signals.note(now, len(plan.new_requests), self._num_ready)
        if not plan.is_empty:
            self._in_flight.append(step)
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float
    ) -> list[RequestUpdate]:
        """Apply the result of the oldest step in flight: sampled tokens, finished requests, reusable blocks.

        Requests that finished while the step ran are skipped, even if a new one has taken the same id.

        Raises:
            EngineError: the worker has another version than the scheduler.
        """
        if output.version != STEP_PROTOCOL_VERSION:
            raise EngineError(
                f"the result of step {plan.step_id} is of version {output.version}, not {STEP_PROTOCOL_VERSION}"
            )
        assert plan.step_id == output.step_id, "steps are out of order"
        step = self._take_from_flight(plan.step_id)
        updates = [
            self._apply(chunk, output, now, step.max_decode_steps)
            for chunk in step.chunks
            if not chunk.request.is_finished
        ]
        self._rounds.note(step, output, now)
        self._mixed.note(step, now)
        if self._observer is not None:
            self._observer(step, plan, output, now)
        return [update for update in updates if update is not None]

    # State

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is waiting or running."""
        return bool(self._queues.by_id)

    def has_work(self) -> bool:
        """Return whether there are requests to run, rows for the worker to free, blocks to copy, or results to come.

        Held requests do not count: a release comes from outside, or from a step.
        """
        waits = self._queues.has_vacated if self._is_paused else self._queues.has_work
        return waits or bool(self._in_flight) or self._kv.has_moves

    def stats(self) -> SchedulerStats:
        """Return current counts and totals."""
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
            saturation=self._saturation(),
            queue_s=self._signals.wait_s(self._num_ready),
            spec_decoding=self._spec_decoding.copy() if self._spec_decoding.num_drafts else None,
            adapters=self._adapter_stats() if self._max_adapters else None,
        )

    @property
    def _num_ready(self) -> int:
        """Waiting requests that only want room."""
        return self._queues.num_waiting - self._queues.num_held

    def _saturation(self) -> float:
        num_running, num_waiting = len(self._queues.running), self._queues.num_waiting
        num_unanswered = 0
        if self._signals.may_refuse(num_running + num_waiting):
            prefilling = sum(not request.num_output_tokens for request in self._queues.running)
            num_unanswered = num_waiting + prefilling
        return self._signals.saturation(num_running, num_waiting, num_unanswered, self._kv.usage)

    def _adapter_stats(self) -> AdapterStats:
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for request in self._queues.by_id.values():
            if request.adapter is not None:
                names[request.status is RequestStatus.RUNNING].add(name_in(request.adapter))
        return AdapterStats(sorted(names[True]), sorted(names[False]), self._max_adapters)

    def observe(self, observer: StepObserver | None) -> None:
        """Call `observer` after each step from now on, in place of any other; None: no longer."""
        self._observer = observer

    @property
    def kv(self) -> KVCacheManager:
        """KV cache manager, for readers; only the scheduler changes it."""
        return self._kv

    def in_order(self, limit: int) -> list[Request]:
        """Return up to `limit` unfinished requests: the running ones, then those that wait, in order of service."""
        return self._queues.in_order(limit)

    def request_ids(self) -> list[str]:
        """Return ids of unfinished requests, oldest first."""
        return list(self._queues.by_id)

    def has(self, request_id: str) -> bool:
        """Return whether a request is unfinished."""
        return request_id in self._queues.by_id

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._is_paused

    def adapted(self) -> dict[str, list[str]]:
        """Return adapter -> ids of unfinished requests that use it."""
        found: dict[str, list[str]] = {}
        for request in self._queues.by_id.values():
            if request.adapter is not None:
                found.setdefault(request.adapter, []).append(request.request_id)
        return found

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """Explain why a request waits or waited; None if it is unknown or finished too long ago."""
        found, request = self._queues.explain(request_id, now), self._queues.by_id.get(request_id)
        if found is None or request is None or request.status is not RequestStatus.RUNNING:
            return found
        return structs.replace(found, pace=self._planner.pace())

    def check_integrity(self) -> None:
        """Check that the queues agree with the requests, and every invariant of the KV cache.

        Raises:
            IntegrityError: internal bug; holds the state.
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
        """Pop the step whose result is in; interrupted steps before it have no result and no unfinished request."""
        while self._in_flight:
            step = self._in_flight.popleft()
            if step.step_id == step_id:
                return step
            assert all(chunk.request.is_finished for chunk in step.chunks), "steps are out of order"
        raise AssertionError("result for an unknown step")

    def _apply(
        self, chunk: Chunk, output: ModelRunnerOutput, now: float, max_decode_steps: int
    ) -> RequestUpdate | None:
        """Apply one chunk's result to its request; None if there is nothing to report."""
        request, request_id = chunk.request, chunk.request.request_id
        request.complete_step(chunk.num_samples)
        if request.beams is not None:
            return self._apply_beams(chunk, request.beams, output, now)
        error = output.failed.get(request_id)
        if error is not None:
            self._kv.disown(request)
            self._queues.finish(request, "error", now)
            return last_update(request, error)
        sampled = output.sampled_token_ids.get(request_id, [])
        count, planned = len(sampled), chunk.num_samples * max_decode_steps
        assert count == planned or 0 < count < planned, f"{request!r}: {sampled} for {planned} samples"
        new_token_ids, stop = self._append(request, sampled)
        if planned == 0 and chunk.pools:
            assert request_id in output.pooled, f"{request!r} was planned to pool, and has nothing"
            stop = "stop", None
        num_further = min(output.num_accepted(request_id), len(new_token_ids))
        if max_decode_steps > 1:
            self._queues.policy.charge([chunk] * num_further)  # the first was charged when planned
        if output.draft_token_ids or request.draft_token_ids:
            request.update_drafts(new_token_ids, output.draft_token_ids.get(request_id))
        if request.status is RequestStatus.RUNNING:  # else it was preempted meanwhile and has no blocks
            end = chunk.end
            if planned > 1 and (self._kv.rolls_back or not chunk.num_drafts):
                end += num_further
                request.num_computed_tokens = end
            self._kv.cache_blocks(request, end)
        if stop is not None:
            self._queues.finish(request, stop[0], now)
        elif new_token_ids:
            self._queues.release(request, now)
        if chunk.num_drafts:
            self._spec_decoding.note(chunk.num_drafts, num_further)
        return update_of(chunk, output, new_token_ids, stop and stop[1])

    def _apply_beams(
        self, chunk: Chunk, beams: Beams, output: ModelRunnerOutput, now: float
    ) -> RequestUpdate | None:
        """Apply a step to all beams of a search: their likeliest next tokens, from which it selects the next beams."""
        request, names = chunk.request, beams.names
        error = next((output.failed[name] for name in names if name in output.failed), None)
        if error is not None:
            self._kv.disown(request)
            self._queues.finish(request, "error", now)
            return last_update(request, error)
        if request.status is not RequestStatus.RUNNING:  # preempted meanwhile, so it begins again
            return None
        if not beams.has_begun:
            self._kv.cache_blocks(request, chunk.end)
        if not chunk.num_samples:
            return None
        entries = [output.logprobs[name][0] for name in names]
        if beams.advance(entries):
            request.token_ids.append(beams.search.live[0].token_ids[-1])
        else:
            self._queues.finish(request, "stop", now)
        return _update(request, [entry.token_ids[0] for entry in entries], logprobs=entries)

    def _append(self, request: Request, sampled: list[int]) -> tuple[list[int], Stop | None]:
        """Append sampled tokens up to the one that finishes the request; returns those added and the stop."""
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
    if request.num_tokens >= max_model_len + pools:
        raise ValidationError(
            f"the request continues {request.num_tokens} tokens, which leave no room for one more in the model's "
            f"context of {max_model_len}",
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


def check_search(request: Request, limits: SchedulerConfig, kv: KVCacheManager, max_model_len: int) -> None:
    """Check that all beams of a search can run at once.

    Raises:
        ValidationError: with the width and the limit.
    """
    width = request.num_rows
    for name, limit in (
        ("max_num_seqs", limits.max_num_seqs),
        ("max_num_batched_tokens", limits.max_num_batched_tokens),
    ):
        if width > limit:
            raise ValidationError(
                f"a search of {width} beams runs them all at once, and {name} is {limit}: search fewer, or start with "
                f"a larger --{name.replace('_', '-')}",
                param="beam_width",
            )
    num_tokens = request.max_computed_tokens(max_model_len)
    needed = kv.max_blocks_of_beams(request.num_prompt_tokens, num_tokens, width)
    if needed > kv.num_usable_blocks:
        raise ValidationError(
            f"a search of {width} beams of up to {num_tokens} tokens ({request.num_prompt_tokens} of prompt) may need "
            f"{needed} blocks of {kv.block_size} tokens in the KV cache, which has {kv.num_usable_blocks}",
            param="max_tokens",
        )


def resolve_scheduler(name: str) -> type[Scheduler]:
    """Return the class named `module:Class`; the built-in one for an empty name.

    Raises:
        ConfigError: there is no such class, or it is no subclass of `Scheduler`.
    """
    if not name:
        return Scheduler
    found: type[Scheduler] = import_subclass(name, Scheduler, "--scheduler-cls")
    return found
