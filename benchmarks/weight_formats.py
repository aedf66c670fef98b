"""How fast products are with weights in each form that quantised checkpoints are kept in, beside bfloat16.

    python -m benchmarks.weight_formats [--rounds 9] [--prefill-rows 512] [--record]

Multiplied are the four matrices of a layer in the shape of half a billion parameters: by one row, with so many copies
of the layer in turn that none is in a cache, and by many rows. Forms take turns in each round; printed is the median
of bfloat16's time by that of the form, where bfloat16 is multiplied as `--matmul-precision auto` does it. `--record`
writes the numbers with the date and the machine, and docs/quantized_checkpoints.md with them: run it in the root of
the repository, and on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import cycle
from statistics import median

import torch
from torch import Tensor

from quire.bench.kernels import ModelShape
from quire.entrypoints.cli.machine import cpu_model
from quire.kernels import cpu, ops
from quire.kernels.cpu.huge_pages import in_matrix_memory
from quire.kernels.linear import FLOAT, Ending, PackedWeight, WeightScheme
from quire.models.quantized.page import PAGE, SPEEDS, kept_forms, page

FLOATS = "floats"
COLD_BYTES = 96 * 2**20
"""What the copies of a layer take at least, more than a cache holds."""
Layer = Sequence[PackedWeight]
Speeds = Mapping[str, tuple[float, float]]
"""How often a form's products are done while bfloat16's are once: in decode, and in prefill."""


def layers_of(scheme: WeightScheme | None, shape: ModelShape, cold_bytes: int) -> list[Layer]:
    """Copies of a layer's matrices, random ones."""
    random = torch.Generator().manual_seed(0)
    matrices = (
        (shape.qkv, shape.hidden, 1),
        (shape.hidden, shape.hidden, 1),
        (2 * shape.intermediate, shape.hidden, 2),
        (shape.hidden, shape.intermediate, 1),
    )
    kept = replace(FLOAT, fast=cpu.multiplies_bfloat16()) if scheme is None else scheme
    first = [
        ops.pack_weight(torch.randn(outputs, inputs, generator=random).bfloat16(), kept, halves)
        for outputs, inputs, halves in matrices
    ]
    count = cold_bytes // sum(matrix.nbytes for matrix in first)
    return [first, *([matrix.moved(_copied) for matrix in first] for _ in range(count))]


def _copied(tensor: Tensor) -> Tensor:
    """In other memory of the same kind."""
    moved = in_matrix_memory(tensor)
    return tensor.clone() if moved is tensor else moved


def product_of(layer: Layer, rows: int) -> Callable[[], None]:
    """Multiplies so many rows by each matrix of a layer."""
    inputs = [torch.randn(rows, matrix.inputs) for matrix in layer]
    endings: list[Ending | None] = [None if matrix.halves == 1 else "silu_and_mul" for matrix in layer]

    def run() -> None:
        for x, matrix, ending in zip(inputs, layer, endings, strict=True):
            ops.packed_linear(x, matrix, None, ending)

    return run


def seconds_of(runs: Sequence[Callable[[], None]]) -> float:
    """The time that all of them take in turn, by their number."""
    start = time.perf_counter()
    for run in runs:
        run()
    return (time.perf_counter() - start) / len(runs)


def measured(shape: ModelShape, rounds: int, prefill_rows: int, cold_bytes: int = COLD_BYTES) -> Speeds:
    """All forms, by what the page calls them."""
    layers = {name: layers_of(scheme, shape, cold_bytes) for name, scheme in kept_forms().items()}
    decode = {name: [product_of(layer, 1) for layer in copies] for name, copies in layers.items()}
    prefill = {name: [product_of(copies[0], prefill_rows)] for name, copies in layers.items()}
    times = [_medians(runs, rounds) for runs in (decode, prefill)]
    return {name: (times[0][FLOATS] / times[0][name], times[1][FLOATS] / times[1][name]) for name in layers}


def _medians(runs: Mapping[str, Sequence[Callable[[], None]]], rounds: int) -> dict[str, float]:
    """After a round that does not count, the median of each form's time."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in _in_turn(list(runs), number):
            times[name].append(seconds_of(runs[name]))
    return {name: median(each[1:]) for name, each in times.items()}


def _in_turn(names: Sequence[str], number: int) -> Iterator[str]:
    """All of them, beginning with another one each time, so that none is always behind the same."""
    turn = cycle(names)
    for _ in range(number % len(names)):
        next(turn)
    for _ in names:
        yield next(turn)


def record(speeds: Speeds, prefill_rows: int) -> None:
    """Write the numbers, and the page that has them."""
    about = {
        "date": datetime.now(UTC).strftime("%d %B %Y").lstrip("0"),
        "machine": f"{cpu_model()} ({cpu.status()})",
        "threads": torch.get_num_threads(),
        "prefill_rows": prefill_rows,
        "speeds": {name: [round(each, 2) for each in both] for name, both in speeds.items()},
    }
    SPEEDS.write_text(json.dumps(about, indent=1) + "\n")
    PAGE.write_text(page())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prefill-rows", type=int, default=512)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    speeds = measured(ModelShape(), args.rounds, args.prefill_rows)
    print(f"{'form':36} {'decode':>8} {'prefill':>8}   times as fast as bfloat16")
    for name, (decode, prefill) in speeds.items():
        print(f"{name:36} {decode:8.2f} {prefill:8.2f}")
    if args.record:
        record(speeds, args.prefill_rows)
        print(f"{SPEEDS} and {PAGE} are written")


if __name__ == "__main__":
    main()
