# SPDX-License-Identifier: Apache-2.0
"""Checks of linears on packed weights: against what the packed weight stands for, and batch-invariant bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.kernel_checks import LIMITS, differs, name_of, randn, relative_error
from benchmarks.gpu.runner import Check
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_05B, TINY, Shape
from benchmarks.gpu.target import Target
from quire.kernels import ops, reference
from quire.kernels.linear import PackedWeight, WeightScheme
from quire.kernels.low_rank import LowRankStacks
from quire.kernels.triton import linear, low_rank
from quire.kernels.triton.quantize import quantize_rows

SCHEMES = {
    "int8": WeightScheme("int8", fast=False),
    "int4": WeightScheme("int4", 32, fast=False),
    "int4 with zero points": WeightScheme("int4", 128, symmetric=False, fast=False),
    "fp8": WeightScheme("fp8"),
    "fp8, one scale": WeightScheme("fp8", per_tensor=True),
    "fp8 by Triton": WeightScheme("fp8", vendor=False),
}
INVARIANT = {
    "float": WeightScheme(invariant=True),
    **{name: SCHEMES[name] for name in ("int8", "int4", "fp8")},
}


def checks(target: Target) -> Iterator[Check]:
    """All schemes for all matrices of the first shape, some for the others."""
    first, others = (TINY, []) if target.tiny else (LLAMA_8B, [QWEN_05B])
    main = target.main_dtype
    for name, scheme in SCHEMES.items():
        limit = LIMITS[torch.bfloat16 if scheme.kind == "fp8" else main]
        for matrix in first.matrices if name in ("int8", "int4", "fp8") else ["down"]:
            run = partial(_matrix, target, first, matrix, scheme, main)
            yield Check(name_of(first, f"{name} linear, {matrix}", main), run, limit)
        for shape in others:
            run = partial(_matrix, target, shape, "down", scheme, main)
            yield Check(name_of(shape, f"{name} linear, down", main), run, limit)
    for dtype in target.dtypes[1:]:
        run = partial(_matrix, target, first, "o", SCHEMES["int4"], dtype)
        yield Check(name_of(first, "int4 linear, o", dtype), run, LIMITS[dtype])
    for name, scheme in INVARIANT.items():
        for matrix in ("qkv", "down"):
            run = partial(_invariant, target, first, matrix, scheme)
            yield Check(name_of(first, f"{name} linear, {matrix}, batch-invariant bits", main), run)
    for name in ("fp8", "fp8 by Triton"):
        run = partial(_quantized_rows, target, first, SCHEMES[name])
        yield Check(name_of(first, f"{name} linear, rows that come quantized, bits", main), run)
    run = partial(_matrix, target, first, "o", INVARIANT["float"], main)
    yield Check(name_of(first, "batch-invariant linear", main), run, LIMITS[main])
    yield Check(name_of(first, "adapters", main), partial(_adapters, target, first), LIMITS[main])
    run = partial(_adapters_alone, target, first)
    yield Check(name_of(first, "adapters, same bits alone as in a batch", main), run)
    yield Check(name_of(first, "logits in float32", main), partial(_logits, target, first), 1e-4)
    yield Check(name_of(first, "int8 embedding", main), partial(_embedding, target, first), 1e-6)


def _packed(
    target: Target, shape: Shape, matrix: str, scheme: WeightScheme, dtype: torch.dtype
) -> PackedWeight:
    outputs, inputs = shape.matrices[matrix]
    weight = randn(target, outputs, inputs, dtype=torch.float32, seed=1).mul_(inputs**-0.5)
    return linear.pack_weight(weight.to(dtype), scheme)


def _matrix(target: Target, shape: Shape, matrix: str, scheme: WeightScheme, dtype: torch.dtype) -> float:
    """One row, several, and so many that the vendor's library multiplies."""
    packed = _packed(target, shape, matrix, scheme, dtype)
    bias = randn(target, packed.outputs, dtype=torch.float32, seed=2)
    errors = []
    for rows in (1, 5) if target.tiny else (1, 33, 600):
        # Numbers and a scale that E4M3 holds exactly: how a number between two of them is rounded is not the question.
        x = randn(target, rows, packed.inputs, dtype=torch.float32).to(torch.float8_e4m3fn).to(dtype)
        x[:, 0] = 7.0
        want = reference.packed_linear(x.float(), packed, bias)
        errors.append(relative_error(linear.packed_linear(x, packed, bias), want))
    return max(errors)


def _invariant(target: Target, shape: Shape, matrix: str, scheme: WeightScheme) -> float:
    packed = _packed(target, shape, matrix, replace(scheme, invariant=True), target.main_dtype)
    rows = 70 if target.tiny else 600
    x = randn(target, rows, packed.inputs, dtype=target.main_dtype)
    whole = linear.packed_linear(x, packed)
    parts = [(0, 1), (3, 11), (0, rows // 2), (rows // 2, rows)]
    return sum(differs(linear.packed_linear(x[start:end], packed), whole[start:end]) for start, end in parts)


def _quantized_rows(target: Target, shape: Shape, scheme: WeightScheme) -> float:
    packed = _packed(target, shape, "qkv", scheme, target.main_dtype)
    x = randn(target, 33, packed.inputs, dtype=target.main_dtype)
    return differs(linear.packed_linear(quantize_rows(x), packed), linear.packed_linear(x, packed))


def _adapted(target: Target, shape: Shape) -> tuple[Tensor, Tensor, LowRankStacks]:
    """Inputs, slots of rows, in runs and mixed, and adapters of rank 16 of the merged q, k and v."""
    inputs, parts = (
        shape.hidden,
        [heads * shape.head_size for heads in (shape.heads, shape.kv_heads, shape.kv_heads)],
    )
    stacks = LowRankStacks.empty(4, parts, inputs, 16, target.main_dtype, target.device)
    stacks.a.copy_(randn(target, *stacks.a.shape, dtype=target.main_dtype, seed=1) * inputs**-0.5)
    stacks.b.copy_(randn(target, *stacks.b.shape, dtype=target.main_dtype, seed=2))
    stacks.scales.fill_(2.0)
    stacks.ranks.fill_(16)
    rows = 20 if target.tiny else 600
    slots = torch.randint(-1, 4, (rows // 2,), dtype=torch.int32, device=target.device)
    slots = torch.cat((slots, slots.sort().values))
    return randn(target, len(slots), inputs, dtype=target.main_dtype), slots, stacks


def _adapters(target: Target, shape: Shape) -> float:
    x, slots, stacks = _adapted(target, shape)
    got, want = (
        x.new_zeros(len(x), stacks.b.shape[-1]),
        torch.zeros(len(x), stacks.b.shape[-1], device=x.device),
    )
    low_rank.low_rank_linear(got, x, slots, stacks)
    ops.low_rank_linear.oracle(want, x.float(), slots, stacks)
    return relative_error(got, want)


def _adapters_alone(target: Target, shape: Shape) -> float:
    x, slots, stacks = _adapted(target, shape)
    whole, parts = x.new_zeros(len(x), stacks.b.shape[-1]), x.new_zeros(len(x), stacks.b.shape[-1])
    low_rank.low_rank_linear(whole, x, slots, stacks)
    for part in (slice(0, 1), slice(1, 4), slice(4, len(x))):
        low_rank.low_rank_linear(parts[part], x[part], slots[part], stacks)
    return differs(parts, whole)


def _logits(target: Target, shape: Shape) -> float:
    """As near to the sums as float32 is, though the factors have fewer bits."""
    weight = randn(target, shape.vocab // 8, shape.hidden, dtype=target.main_dtype, seed=1)
    x = randn(target, 5, shape.hidden, dtype=target.main_dtype)
    return relative_error(ops.linear(x, weight, None, torch.float32), x.double() @ weight.double().t())


def _embedding(target: Target, shape: Shape) -> float:
    weight = randn(target, shape.vocab, shape.hidden, dtype=target.main_dtype)
    packed = linear.pack_weight(weight, WeightScheme("int8"))
    ids = torch.randint(0, shape.vocab, (50,), device=target.device)
    return relative_error(linear.packed_embedding(ids, packed), reference.unpack_weight(packed)[ids])
