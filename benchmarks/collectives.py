# SPDX-License-Identifier: Apache-2.0
"""Cost of communication between ranks: `python -m benchmarks.collectives [--ranks 2]`.

Ranks are processes of one thread each. Sums are formed through memory that they share, and through gloo, in turn.
Latency is that of a sum of 4 KB, called from Python and, as in a decode step, played from a tape. Bandwidth is that of
a sum of 8 MB, from a tape, whose memory is there, beside copies of as much by all ranks at once. Every number is the
median of rounds, of the first rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire.distributed.gloo import Gloo, file_store
from quire.distributed.group import Group
from quire.distributed.shared_memory import share_memory
from quire.kernels import ops
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.cpu.recorded_graph import Arena, record

SMALL, LARGE = 4 << 10, 8 << 20
ROUNDS, CALLS = 30, 100


def seconds(call: Callable[[], object], calls: int) -> float:
    """Return the median seconds of one call."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)


def measured(gloo: Group, shared: Group) -> dict[str, float]:
    """Name -> seconds."""
    small, large = torch.ones(SMALL // 4), torch.ones(LARGE // 4)

    def many() -> torch.Tensor:
        for _ in range(CALLS):
            total = ops.all_reduce(small, shared)
        return total

    tape = record(many, Arena(64 * SMALL))
    large_tape = record(lambda: ops.all_reduce(large, shared), Arena(LARGE))
    copy = torch.empty_like(large)
    return {
        "taped": seconds(tape.replay, 10) / CALLS,
        "small": seconds(lambda: ops.all_reduce(small, shared), CALLS),
        "small gloo": seconds(lambda: ops.all_reduce(small, gloo), 10),
        "copy": seconds(lambda: copy.copy_(large), 4),
        "large": seconds(large_tape.replay, 4),
        "large gloo": seconds(lambda: ops.all_reduce(large, gloo), 1),
    }


def rank(number: int, size: int, directory: Path, results: Any) -> None:
    set_num_threads(1)
    gloo = Gloo(number, size, file_store(directory / "ranks", size))
    shared = share_memory(gloo)
    with torch.inference_mode():
        found = measured(gloo, shared)
    if number == 0:
        results.put(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    size = parser.parse_args().ranks
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=rank, args=(number, size, Path(directory), results))
            for number in range(size)
        ]
        for process in ranks:
            process.start()
        found = results.get()
        for process in ranks:
            process.join()
    report(found, size)


def report(found: dict[str, float], size: int) -> None:
    of_copy, times = 2 * found["copy"] / found["large"], found["small gloo"] / found["small"]
    microseconds = {name: f"{found[name] * 1e6:.1f} us" for name in ("taped", "small", "small gloo")}
    speed = {name: f"{LARGE / found[name] / 1e9:.1f} GB/s" for name in ("large", "large gloo")}
    print(f"{size} ranks, 4 KB: {microseconds['taped']} from a tape, {microseconds['small']} from Python")
    print(f"    by gloo: {microseconds['small gloo']}, {times:.0f} times as long")
    print(f"{size} ranks, 8 MB: {speed['large']}, {of_copy:.0%} of half a copy's speed")
    print(f"    by gloo: {speed['large gloo']}, {found['large gloo'] / found['large']:.1f} times as long")


if __name__ == "__main__":
    main()
