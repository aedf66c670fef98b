# SPDX-License-Identifier: Apache-2.0
"""Speed of matmuls with weights in each format of quantized checkpoints, beside bfloat16.

    python -m benchmarks.weight_formats [--rounds 9] [--prefill-rows 512] [--record]

Multiplied are the four matrices of a layer in the shape of half a billion parameters: by one row, with so many copies
of the layer in turn that none is in a cache, and by many rows. Forms take turns in each round; printed is the median
of bfloat16's time by that of the form, where bfloat16 is multiplied as `--matmul-precision auto` does it. Then the same
of products by activations that are rounded first, as in mode "checkpoint". `--record`
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
from quire.entrypoints.cli.doctor import cpu_model
from quire.kernels import cpu, ops
from quire.kernels.cpu.arena import on_huge_pages
from quire.kernels.linear import FLOAT, FusedActivation, PackedWeight, RowQuantization, WeightScheme
from tools.quantized_page import PAGE, SPEEDS, kept_forms, page, rounded_forms

FLOATS = "floats"
COLD_BYTES = 96 * 2**20
"""What the copies of a layer take at least, more than a cache holds."""
Layer = Sequence[PackedWeight]
Forms = Mapping[str, tuple[WeightScheme | None, RowQuantization | None]]
"""What weights are kept in, None for floats, and how what they are multiplied by is rounded."""
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
    if kept.is_plain_int8:
        first = [matrix.with_code_sums() for matrix in first]
    count = cold_bytes // sum(matrix.nbytes for matrix in first)
    return [first, *([matrix.moved(_copied) for matrix in first] for _ in range(count))]


def _copied(tensor: Tensor) -> Tensor:
    """In other memory of the same kind."""
    moved = on_huge_pages(tensor)
    return tensor.clone() if moved is tensor else moved


def product_of(layer: Layer, rows: int, rounding: RowQuantization | None = None) -> Callable[[], None]:
    """Multiplies so many rows by each matrix of a layer, after they were rounded if that is said."""
    inputs = [torch.randn(rows, matrix.inputs) for matrix in layer]
    endings: list[FusedActivation | None] = [
        None if matrix.halves == 1 else "silu_and_mul" for matrix in layer
    ]

    def run() -> None:
        for x, matrix, ending in zip(inputs, layer, endings, strict=True):
            ops.packed_linear(x, matrix, None, ending)

    def run_rounded() -> None:
        for x, matrix, ending in zip(inputs, layer, endings, strict=True):
            made = ops.rounded_linear(x, matrix, rounding=rounding)
            if ending is not None:
                ops.silu_and_mul(made)

    return run if rounding is None else run_rounded


def seconds_of(runs: Sequence[Callable[[], None]]) -> float:
    """The time that all of them take in turn, by their number."""
    start = time.perf_counter()
    for run in runs:
        run()
    return (time.perf_counter() - start) / len(runs)


def measured(shape: ModelShape, rounds: int, prefill_rows: int, cold_bytes: int = COLD_BYTES) -> Speeds:
    """All forms, by what the page calls them."""
    return _measured(
        {name: (scheme, None) for name, scheme in kept_forms().items()},
        shape,
        rounds,
        prefill_rows,
        cold_bytes,
    )


def measured_rounded(
    shape: ModelShape, rounds: int, prefill_rows: int, cold_bytes: int = COLD_BYTES
) -> Speeds:
    """All roundings of activations, by what the page calls them."""
    forms: Forms = {FLOATS: (None, None), **rounded_forms()}
    speeds = _measured(forms, shape, rounds, prefill_rows, cold_bytes)
    return {name: times for name, times in speeds.items() if name != FLOATS}


def _measured(forms: Forms, shape: ModelShape, rounds: int, prefill_rows: int, cold_bytes: int) -> Speeds:
    kept = {scheme: layers_of(scheme, shape, cold_bytes) for scheme, _ in forms.values()}
    decode, prefill = {}, {}
    for name, (scheme, rounding) in forms.items():
        copies = kept[scheme]
        decode[name] = [product_of(layer, 1, rounding) for layer in copies]
        prefill[name] = [product_of(copies[0], prefill_rows, rounding)]
    times = [_medians(runs, rounds) for runs in (decode, prefill)]
    return {name: (times[0][FLOATS] / times[0][name], times[1][FLOATS] / times[1][name]) for name in forms}


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


def record(speeds: Speeds, rounded: Speeds, prefill_rows: int) -> None:
    """Write the numbers, and the page that has them."""
    about = {
        "date": datetime.now(UTC).strftime("%d %B %Y").lstrip("0"),
        "machine": f"{cpu_model()} ({cpu.status()})",
        "threads": torch.get_num_threads(),
        "prefill_rows": prefill_rows,
        "speeds": _in_file(speeds),
        "rounded": _in_file(rounded),
    }
    SPEEDS.write_text(json.dumps(about, indent=1) + "\n")
    PAGE.write_text(page())


def _in_file(speeds: Speeds) -> dict[str, list[float]]:
    return {name: [round(each, 2) for each in both] for name, both in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prefill-rows", type=int, default=512)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    speeds, rounded = (
        dict(measure(ModelShape(), args.rounds, args.prefill_rows))
        for measure in (measured, measured_rounded)
    )
    print(f"{'form':36} {'decode':>8} {'prefill':>8}   times as fast as bfloat16")
    for name, (decode, prefill) in (speeds | rounded).items():
        print(f"{name:36} {decode:8.2f} {prefill:8.2f}")
    if args.record:
        record(speeds, rounded, args.prefill_rows)
        print(f"{SPEEDS} and {PAGE} are written")


if __name__ == "__main__":
    main()
