# SPDX-License-Identifier: Apache-2.0
"""Speed of single kernels in the shapes of real steps, beside their minimal memory traffic or arithmetic.

Invariant: on a GPU launches are recorded and replayed, so the host's time is not in a number. Products in fp8 are
measured against twice the arithmetic of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.attention_checks import Batch, make_call
from benchmarks.gpu.kernel_checks import randn
from benchmarks.gpu.limits import Limits, best_of
from benchmarks.gpu.rows import Row
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.target import Target
from quire.kernels import ops
from quire.kernels.linear import PackedWeight, WeightScheme

NUM_CALLS = 10
CACHE_BYTES = 256 << 20
"""More than any cache of a device holds: matrices take turns until so much is read."""

ATTENTION: dict[str, Batch] = {
    "decode, 1 at 16k": [(1, 16384)],
    "decode, 64 at 1k": [(1, 1024)] * 64,
    "decode, 256 at 1k": [(1, 1024)] * 256,
    "decode, 1 at 64k among 63 at 128": [(1, 65536), *[(1, 128)] * 63],
    "mixed, 255 at 1k and a chunk of 1793": [*[(1, 1024)] * 255, (1793, 1793)],
    "a prompt of 2k": [(2048, 2048)],
    "the last 2k of 16k": [(2048, 16384)],
}
TINY_ATTENTION: dict[str, Batch] = {
    "decode, 1": [(1, 40)],
    "mixed": [(1, 20), (7, 31)],
    "a prompt": [(20, 20)],
}
SCHEMES = {
    "int8": WeightScheme("int8"),
    "int4": WeightScheme("int4", 32),
    "fp8": WeightScheme("fp8"),
    "fp8 by Triton": WeightScheme("fp8", vendor=False),
}
ROWS = (1, 16, 64, 256)


def device_seconds(target: Target, run: Callable[[], object]) -> float:
    """Seconds of one of many calls in a row."""

    def run_all() -> None:
        for _ in range(NUM_CALLS):
            run()

    run()
    target.synchronize()
    if target.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_all()
        return best_of(target, graph.replay, 3) / NUM_CALLS
    return best_of(target, run_all, 3) / NUM_CALLS


@torch.inference_mode()
def attention_rows(target: Target, limits: Limits, shape: Shape) -> Iterator[Row]:
    """One layer's attention."""
    attend: Any = ops.paged_attention if target.is_gpu else ops.paged_attention.oracle
    for name, batch in (TINY_ATTENTION if target.tiny else ATTENTION).items():
        call = make_call(target, shape, target.main_dtype, batch)
        seconds = device_seconds(target, partial(call.by, attend))
        yield Row(
            f"{shape.name}, attention: {name}",
            "us",
            1e6 * seconds,
            1e6 * attention_limit_s(limits, shape, batch),
        )


def attention_limit_s(limits: Limits, shape: Shape, batch: Batch) -> float:
    """Keys and values read once, or two products with all that each query sees."""
    read = sum(limits.context_bytes(shape, seq_len) for _, seq_len in batch) / shape.num_layers
    pairs = sum(query_len * (2 * seq_len - query_len + 1) // 2 for query_len, seq_len in batch)
    return limits.seconds(read, 4 * shape.heads * shape.head_size * pairs)


@torch.inference_mode()
def linear_rows(target: Target, limits: Limits, shape: Shape) -> Iterator[Row]:
    """A wide matrix and a deep one, in every scheme."""
    for matrix in ("gate up", "down"):
        outputs, inputs = shape.matrices[matrix]
        dense = randn(target, outputs, inputs, dtype=target.main_dtype)
        for name in ("float", *(SCHEMES if target.is_gpu else ("int8", "int4"))):
            weight = dense if name == "float" else ops.pack_weight(dense, SCHEMES[name])
            for rows in ROWS:
                x = randn(target, rows, inputs, dtype=target.main_dtype)
                seconds = _product_seconds(target, x, weight)
                operations = 2 * rows * outputs * inputs // (2 if name.startswith("fp8") else 1)
                best = limits.seconds(weight.nbytes, operations)
                yield Row(f"{shape.name}, {matrix}, {name}, {rows} rows", "us", 1e6 * seconds, 1e6 * best)


def _product_seconds(target: Target, x: Tensor, weight: Tensor | PackedWeight) -> float:
    num_copies = 1 if target.tiny else 1 + CACHE_BYTES // weight.nbytes
    copies = [weight, *(_copy(weight) for _ in range(num_copies - 1))]

    def run() -> None:
        for one in copies:
            if isinstance(one, PackedWeight):
                ops.packed_linear(x, one)
            else:
                ops.linear(x, one)

    return device_seconds(target, run) / num_copies


def _copy(weight: Tensor | PackedWeight) -> Tensor | PackedWeight:
    if isinstance(weight, Tensor):
        return weight.clone()
    return weight.moved(torch.clone)
