# SPDX-License-Identifier: Apache-2.0
"""Cost of the scheduler: a decode step, the admission of a request, a block.

    python benchmarks/scheduler_cost.py [--num-running 256] [--policy fcfs] [--profile]

No executor: every request samples a token in every step. Prints microseconds, each the median over the best of
several runs; `--profile` prints where a step's time goes instead.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

from quire.config import EngineConfig
from quire.kv_cache.block_pool import DevicePool
from quire.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from quire.sampling_params import SamplingParams
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler

NUM_RUNS = 7
NUM_STEPS = 100
PROMPT_LEN = 32
BLOCK_SIZE = 16
NUM_BLOCKS = 16384


def make_scheduler(num_running: int, policy: str) -> Scheduler:
    """With room for all requests; blocks of 16 tokens, prefix caching on."""
    config = EngineConfig.from_args(
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * PROMPT_LEN,
        max_model_len=512,
        block_size=BLOCK_SIZE,
        scheduling_policy=policy,
    )
    spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype_bytes=4)
    return Scheduler(config, KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(("layer",), spec),), {"layer": spec}))


def make_request(number: int) -> Request:
    """No two share a prefix, and none ends before the measurement does."""
    return Request(
        request_id=f"cmpl-{number:032x}-0",
        prompt_token_ids=[number % 1000, *range(PROMPT_LEN - 1)],
        sampling_params=SamplingParams(max_tokens=400),
        eos_token_ids=[2],
        tenant=f"tenant-{number % 8}",
    )


def result_of(plan: SchedulerOutput) -> ModelRunnerOutput:
    """Every request samples a token."""
    return ModelRunnerOutput(plan.step_id, {name: [7] for name in plan.num_scheduled_tokens})


class Watch:
    """A clock for the scheduler's `now`, and a stopwatch."""

    def __init__(self) -> None:
        self.now = 0.0

    def microseconds(self, call: Callable[[], object]) -> float:
        """Return the duration of a call."""
        self.now += 0.02
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e6


def run(num_running: int, policy: str) -> dict[str, float]:
    """One run: label -> microseconds."""
    scheduler, watch = make_scheduler(num_running, policy), Watch()
    requests = [make_request(number) for number in range(num_running)]
    admit = watch.microseconds(lambda: [scheduler.add_request(request, watch.now) for request in requests])
    plans: list[SchedulerOutput] = []
    start = watch.microseconds(lambda: plans.append(scheduler.schedule(watch.now)))
    scheduler.update_from_output(plans[-1], result_of(plans[-1]), watch.now)
    schedule, update = [], []
    for _ in range(NUM_STEPS):
        schedule.append(watch.microseconds(lambda: plans.append(scheduler.schedule(watch.now))))
        plan = plans.pop()
        output = result_of(plan)
        update.append(watch.microseconds(lambda: scheduler.update_from_output(plan, output, watch.now)))  # noqa: B023
    return {
        "schedule": statistics.median(schedule),
        "update": statistics.median(update),
        "step": statistics.median(map(sum, zip(schedule, update, strict=True))),
        "add, per request": admit / num_running,
        "start, per request": start / num_running,
        "admit, per request": (admit + start) / num_running,
        **block_costs(watch),
    }


def block_costs(watch: Watch, num_blocks: int = 4096) -> dict[str, float]:
    """Taking blocks from a pool one by one, and giving them back."""
    pool = DevicePool(num_blocks + 1)
    taken = watch.microseconds(lambda: [pool.get_new_blocks(1) for _ in range(num_blocks)])
    freed = watch.microseconds(lambda: [pool.free([block]) for block in pool.blocks[1:]])
    return {"allocate, per block": taken / num_blocks, "free, per block": freed / num_blocks}


def profile(num_running: int, policy: str) -> None:
    """Print the functions in which a decode step spends its time."""
    profiler = cProfile.Profile()
    profiler.runcall(run, num_running, policy)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-running", type=int, default=256)
    parser.add_argument("--policy", choices=("fcfs", "priority", "fair"), default="fcfs")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.profile:
        profile(args.num_running, args.policy)
        return
    results = [run(args.num_running, args.policy) for _ in range(NUM_RUNS)]
    best = min(results, key=lambda result: result["step"])
    for label, microseconds in best.items():
        print(f"{label:20} {microseconds:8.1f} us")


if __name__ == "__main__":
    main()
