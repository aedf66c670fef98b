# SPDX-License-Identifier: Apache-2.0
"""Gain of prefix-aware routing: requests per second served in time, for each policy, in simulated time.

    python -m benchmarks.routing [--replicas 4] [--groups 32] [--rates 12 16 20 24] [--policies prefix round_robin]

Requests arrive at random and share prompts' beginnings: each belongs to one of `--groups`, whose prompts have the
same 1,024 tokens first. Schedulers, caches and router are the real ones; the null executor computes, and a step takes
as long as a cost model says. No real time goes in, so every run gives the same numbers.

In time: the first token within a second, and the later ones within 60 ms each on average.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.front_end import FrontEnd, Outgoing
from quire.engine.messages import CoreRequest, EngineCoreOutputs
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.replicas.configs import replica_configs
from quire.engine.startup import prepare
from quire.executor.base import Executor
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput

PREFIX_LEN, SUFFIX_LEN, OUTPUT_LEN = 1024, 64, 32
BLOCK_SIZE = 16
CACHED_GROUPS = 12
"""So many prefixes have room in a replica's cache beside the requests that run."""
MAX_FIRST_S, MAX_NEXT_S = 1.0, 0.06


@dataclass(frozen=True)
class CostModel:
    """Seconds that a step takes: of a small model on a processor with some 16 cores."""

    step_s: float = 0.008
    token_s: float = 0.0002

    def of(self, plan: SchedulerOutput) -> float:
        return self.step_s + self.token_s * plan.total_num_scheduled_tokens


@dataclass
class Clock:
    """Time that its owner moves."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Replica:
    """A core with a clock of its own, which a step moves on by what it costs; what it is told waits until it ends."""

    def __init__(self, config: EngineConfig, costs: CostModel) -> None:
        self.clock = Clock()
        self.core = EngineCore(config, self.clock)
        self.inbox: deque[CoreRequest] = deque()
        self.is_busy = False
        self._costs = costs
        self._slow_down(self.core.executor)

    def step(self, now: float) -> EngineCoreOutputs | None:
        """Begin what there is to do; its news come when `clock` says. None: there is nothing."""
        self.clock.now = now
        while self.inbox:
            self.core.handle(self.inbox.popleft())
        self.is_busy = self.core.has_work()
        return self.core.step() if self.is_busy else None

    def _slow_down(self, executor: Executor) -> None:
        execute = executor.execute_model

        def timed(plan: SchedulerOutput) -> ModelRunnerOutput:
            self.clock.now += self._costs.of(plan)
            return execute(plan)

        executor.execute_model = timed  # type: ignore[method-assign]


@dataclass
class Served:
    """Times of a request's arrival and of its first and last token."""

    came: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    num_cached: int = 0

    @property
    def is_in_time(self) -> bool:
        next_s = (self.last - self.first) / max(self.num_tokens - 1, 1)
        return self.first - self.came <= MAX_FIRST_S and next_s <= MAX_NEXT_S


class Simulation:
    """A front end and its replicas, from event to event."""

    def __init__(self, config: EngineConfig, costs: CostModel) -> None:
        self._clock = Clock()
        num_replicas = config.parallel.num_replicas
        self._front_end = FrontEnd(config, num_cores=num_replicas, clock=self._clock)
        self._replicas = [Replica(one, costs) for one in replica_configs(config, in_process=True)]
        for index, replica in enumerate(self._replicas):
            self._front_end.take_in(index, replica.core.ready)
        self._events: list[tuple[float, int, Any]] = []
        self._order = itertools.count()

    def run(self, arrivals: Sequence[tuple[float, list[int]]]) -> list[Served]:
        """Serve these prompts, each at its time."""
        served = [Served(came) for came, _ in arrivals]
        for one, (came, prompt) in zip(served, arrivals, strict=True):
            self._at(came, (one, prompt))
        while self._events:
            self._clock.now, _, event = heapq.heappop(self._events)
            self._happen(*event)
        return served

    def _happen(self, who: Served | int, what: Any) -> None:
        if isinstance(who, Served):
            self._submit(who, what)
        else:
            self._replicas[who].is_busy = False
            self._send(self._front_end.take_in(who, what))
            self._go_on(who)

    def _submit(self, one: Served, prompt: list[int]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
        _, messages = self._front_end.submit("r", TokenizedPrompt(prompt, None), params, self._sink(one))
        self._send(messages)

    def _sink(self, one: Served) -> Any:
        def take(output: RequestOutput) -> None:
            one.first = one.first or self._clock.now
            one.last, one.num_tokens = self._clock.now, len(output.outputs[0].token_ids)
            one.num_cached = output.num_cached_tokens or 0

        return take

    def _send(self, messages: list[Outgoing]) -> None:
        for index, message in messages:
            self._replicas[index].inbox.append(message)
            self._go_on(index)

    def _go_on(self, index: int) -> None:
        replica = self._replicas[index]
        if not replica.is_busy and (outputs := replica.step(self._clock.now)) is not None:
            self._at(replica.clock.now, (index, outputs))

    def _at(self, time: float, event: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))


def arrivals(
    rate: float, num_requests: int, num_groups: int, vocab_size: int, seed: int
) -> Iterator[tuple[float, list[int]]]:
    """Prompts of groups that are drawn at random, at random times, `rate` per second."""
    rng, now = random.Random(seed), 0.0
    prefixes = [[rng.randrange(3, vocab_size) for _ in range(PREFIX_LEN)] for _ in range(num_groups)]
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        yield now, rng.choice(prefixes) + [rng.randrange(3, vocab_size) for _ in range(SUFFIX_LEN)]


def make_config(policy: str, num_replicas: int) -> EngineConfig:
    blocks_of_prefix = PREFIX_LEN // BLOCK_SIZE
    config = EngineConfig.from_args(
        distributed_executor_backend="null",
        data_parallel_size=num_replicas,
        routing_policy=policy,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=(CACHED_GROUPS + 4) * blocks_of_prefix,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        skip_tokenizer_init=True,
        async_scheduling=False,
    )
    return prepare(config, "server")


@dataclass(frozen=True)
class Result:
    """Result of one run."""

    goodput: float
    """Requests per second that were served in time, from the first arrival to the last end."""
    in_time: float
    cached: float
    """Share of the prompts' tokens."""


def measure(
    policy: str, num_replicas: int, num_groups: int, rate: float, num_requests: int, seed: int = 0
) -> Result:
    """One run."""
    config = make_config(policy, num_replicas)
    coming = list(arrivals(rate, num_requests, num_groups, config.arch.vocab_size, seed))
    served = Simulation(config, CostModel()).run(coming)
    in_time = sum(one.is_in_time for one in served)
    elapsed = max(one.last for one in served) - served[0].came
    cached = sum(one.num_cached for one in served) / (num_requests * (PREFIX_LEN + SUFFIX_LEN))
    return Result(in_time / elapsed, in_time / num_requests, cached)


def main() -> None:
    parser = argparse.ArgumentParser(description="Goodput by routing policy.")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rates", type=float, nargs="+", default=[12, 16, 20, 24, 28, 32, 36, 40])
    parser.add_argument("--policies", nargs="+", default=["prefix", "least_loaded", "round_robin"])
    args = parser.parse_args()
    print(f"{args.replicas} replicas, {args.groups} shared prefixes of {PREFIX_LEN} tokens")
    print("policy          rate   goodput   in time   cached")
    best: dict[str, float] = {}
    for policy, rate in itertools.product(args.policies, args.rates):
        result = measure(policy, args.replicas, args.groups, rate, args.requests)
        best[policy] = max(best.get(policy, 0.0), result.goodput)
        shares = f"{result.in_time:8.0%}  {result.cached:6.0%}"
        print(f"{policy:13} {rate:6.1f} {result.goodput:9.2f}  {shares}", flush=True)
    for policy, goodput in best.items():
        print(f"{policy}: at most {goodput:.2f} requests per second in time")


if __name__ == "__main__":
    main()
