# SPDX-License-Identifier: Apache-2.0
"""Seconds of a weight update by each way, from the first message until the new weights are in use.

    python -m benchmarks.weight_update [MODEL] [--rounds 5]

MODEL is a directory with a config.json; its weights are random, in bfloat16. `directory` is in /dev/shm if that has
room, as a trainer of the same host would write it; writing it is not timed. `segment` and `tcp` send what memory holds.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from benchmarks.random_checkpoint import engine_of, tensors_of, write_checkpoint
from quire import LLM
from quire.training.trainer import WeightServer, describe, remove_segment, write_segment

SHM = Path("/dev/shm")
SEGMENT = "quire-benchmark"

Way = Callable[[LLM, dict[str, Tensor], Path], float]


def by_directory(llm: LLM, tensors: dict[str, Tensor], place: Path) -> float:
    started = time.perf_counter()
    llm.weights.load(str(place))
    return time.perf_counter() - started


def by_segment(llm: LLM, tensors: dict[str, Tensor], place: Path) -> float:
    info = write_segment(SEGMENT, tensors)
    try:
        started = time.perf_counter()
        llm.weights.begin()
        llm.weights.update(info)
        llm.weights.finish()
        return time.perf_counter() - started
    finally:
        remove_segment(SEGMENT)


def by_tcp(llm: LLM, tensors: dict[str, Tensor], place: Path) -> float:
    server = WeightServer()

    def send() -> None:
        server.accept()
        server.send(tensors)

    thread = threading.Thread(target=send)
    thread.start()
    llm.weights.connect(server.address)
    started = time.perf_counter()
    llm.weights.begin()
    llm.weights.update(describe(tensors))
    llm.weights.finish()
    seconds = time.perf_counter() - started
    thread.join()
    llm.weights.disconnect()
    server.close()
    return seconds


WAYS: dict[str, Way] = {"directory": by_directory, "segment": by_segment, "tcp": by_tcp}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="benchmarks/models/dummy-0.5b", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with engine_of(args.model) as llm:
        tensors = tensors_of(args.model, seed=1)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        has_room = SHM.is_dir() and shutil.disk_usage(SHM).free > 3 * num_bytes
        with tempfile.TemporaryDirectory(dir=SHM if has_room else None) as folder:
            place = write_checkpoint(args.model, Path(folder) / "step", tensors)
            for name, way in WAYS.items():
                seconds = sorted(way(llm, tensors, place) for _ in range(args.rounds))
                median = seconds[len(seconds) // 2]
                print(f"{name:10} {num_bytes / 1e9:.2f} GB: best {seconds[0]:.2f} s, median {median:.2f} s")


if __name__ == "__main__":
    main()
