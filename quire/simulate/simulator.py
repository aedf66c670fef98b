# SPDX-License-Identifier: Apache-2.0
"""Simulation of one engine under one load, in virtual time.

The scheduler, the KV cache and the step loop are the engine's own; the executor computes nothing, checks every plan and
lets the clock advance by what the plan costs on the machine. Invariant: the same machine, configuration and load give
the same result; no real clock is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from quire.config import EngineConfig
from quire.engine.step_loop import make_loop
from quire.errors import ValidationError
from quire.executor.null import NullExecutor
from quire.kv_cache.spec import KVCacheConfig
from quire.sampling_params import SamplingParams
from quire.scheduler.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.simulate.costs import PlanCosts, work_of_plan
from quire.simulate.load import SimulatedRequest

SAMPLE_EVERY_S = 0.01  # Shortest time between two samples of a timeline.


class VirtualClock:
    """Seconds since the start of a simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, now: float) -> None:
        """Set a later time; an earlier one has no effect."""
        self.now = max(self.now, now)


class CostedExecutor(NullExecutor):
    """Null executor whose plans take the time that they cost; a plan starts when it and all before it can."""

    def __init__(
        self, config: EngineConfig, cache: KVCacheConfig, costs: PlanCosts, clock: VirtualClock
    ) -> None:
        super().__init__(config, specs=cache.layer_specs)
        self._costs = costs
        self._clock = clock
        self._ends_at = 0.0
        self._passes = 1
        self._starts: deque[float] = deque()
        self.initialize_kv_cache(cache)

    def submit(self, plan: SchedulerOutput) -> None:
        self._starts.append(self._clock.now)
        super().submit(plan)

    def collect(self) -> ModelRunnerOutput:
        plan, _ = self._submitted[0]
        self._passes = self._passes_in_time(plan)
        seconds = self._costs.seconds(work_of_plan(plan, self._passes))
        self._ends_at = max(self._ends_at, self._starts.popleft()) + seconds
        self._clock.advance_to(self._ends_at)
        return msgspec.structs.replace(super().collect(), forward_s=seconds)

    def _passes_in_time(self, plan: SchedulerOutput) -> int:
        """Return the passes of a plan that a worker runs before --max-multi-step-s is over, at least 1.

        A plan that only frees rows or moves blocks has none.
        """
        if not plan.scheduled:
            return 0
        one, two = (self._costs.seconds(work_of_plan(plan, passes)) for passes in (1, 2))
        limit = self.config.scheduler.max_multi_step_s
        further = (limit - one) / (two - one) if two > one else float(plan.max_decode_steps)
        return max(1, min(plan.max_decode_steps, 1 + int(max(further, 0.0))))

    def _num_decode_steps(self, plan: SchedulerOutput) -> int:
        return self._passes


@dataclass
class RequestTimes:
    """Times of one request in seconds; `gaps_s` lie between its outputs after the first."""

    arrival_s: float
    num_prompt_tokens: int
    first_s: float = 0.0
    last_s: float = 0.0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str = ""
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """State of the engine after a step."""

    now_s: float
    num_running: int
    num_waiting: int
    cache_usage: float


@dataclass(frozen=True)
class SimulatedRun:
    """Result of a simulation; requests in order of arrival, and those that the engine refused with the reason."""

    requests: list[RequestTimes]
    refused: list[str]
    timeline: list[Sample]
    num_steps: int
    num_preemptions: int
    cache_bytes: int


class Simulator:
    """One engine in virtual time.

    Args:
        config: resolved configuration.
        cache: its KV cache.
        costs: of its steps.
        concurrency: most requests in flight; others are sent as earlier ones end. 0: no limit.
        front_end_s: time of a request outside the core.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCacheConfig,
        costs: PlanCosts,
        concurrency: int = 0,
        front_end_s: float = 0.0,
    ) -> None:
        self._clock = VirtualClock()
        self._scheduler = Scheduler(config, cache)
        executor = CostedExecutor(config, cache, costs, self._clock)
        self._loop = make_loop(config.scheduler, self._scheduler, executor, self._clock)
        self._cache = cache
        self._concurrency = concurrency
        self._front_end_s = front_end_s
        self._times: dict[str, RequestTimes] = {}
        self._refused: list[str] = []
        self._timeline: list[Sample] = []
        self._num_in_flight = 0

    def run(self, load: Iterable[SimulatedRequest]) -> SimulatedRun:
        """Run a load, in order of arrival, to its end."""
        waiting = deque(enumerate(load))
        num_steps = 0
        while waiting or self._scheduler.has_work():
            self._send(waiting)
            if not self._scheduler.has_work():
                continue
            for update in self._loop.step():
                self._record(update)
            num_steps += 1
            self._sample()
        stats = self._scheduler.stats()
        self._scheduler.check_integrity()
        return SimulatedRun(
            [*self._times.values()],
            self._refused,
            self._timeline,
            num_steps,
            stats.num_preemptions,
            self._cache.bytes,
        )

    def _send(self, waiting: deque[tuple[int, SimulatedRequest]]) -> None:
        """Add the requests that have arrived; an idle engine begins as soon as it has the next one."""
        if waiting and not self._scheduler.has_work():
            # Of several that are sent at once, a server has received one when its first step begins.
            number, request = waiting.popleft()
            self._clock.advance_to(request.arrival_s)
            self._add(str(number), request)
            return
        while waiting and waiting[0][1].arrival_s <= self._clock.now and self._has_place():
            number, request = waiting.popleft()
            self._add(str(number), request)

    def _has_place(self) -> bool:
        return not self._concurrency or self._num_in_flight < self._concurrency

    def _add(self, name: str, request: SimulatedRequest) -> None:
        # A request that had to wait for a place is sent, and measured, from then on.
        arrival = self._clock.now if self._concurrency else request.arrival_s
        params = SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True)
        try:
            self._scheduler.add_request(
                Request(
                    request_id=name,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling_params=params,
                    arrival_time=arrival,
                    priority=request.priority,
                    tenant=request.tenant,
                ),
                self._clock.now,
            )
        except ValidationError as error:
            self._refused.append(f"request {name}: {error}")
            return
        self._times[name] = RequestTimes(arrival, len(request.prompt_token_ids))
        self._num_in_flight += 1

    def _record(self, update: RequestUpdate) -> None:
        times, now = self._times[update.request_id], self._clock.now + self._front_end_s
        if update.new_token_ids:
            if times.num_output_tokens:
                times.gaps_s.append(now - times.last_s)
            else:
                times.first_s, times.num_cached_tokens = now, update.num_cached_tokens
            times.last_s = now
            times.num_output_tokens += len(update.new_token_ids)
        if update.finish_reason is not None:
            times.finish_reason = update.finish_reason
            self._num_in_flight -= 1

    def _sample(self) -> None:
        now = self._clock.now
        if self._timeline and now < self._timeline[-1].now_s + SAMPLE_EVERY_S:
            return
        stats = self._scheduler.stats()
        self._timeline.append(Sample(now, stats.num_running, stats.num_waiting, stats.kv_cache_usage))
