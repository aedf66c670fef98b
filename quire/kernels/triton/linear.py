"""Linear layers on integer weights that stay rows: a matrix is widened in registers while it is multiplied.

int8 has a scale per output, int4 a scale (and a zero point) per output and group of k; see `quire.kernels.linear`
for the schemes. Half of an int4 group stands in the low nibbles and half in the high ones, so that both meet
activations that lie side by side.

Invariant: a tile of outputs and the number of parts into which k is cut depend on the matrix alone, and the parts are
added in order; only the number of rows in a tile depends on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference
from quire.kernels.linear import PackedWeight, WeightScheme
from quire.kernels.triton.activation import silu_and_mul
from quire.kernels.triton.launch import next_power_of_2

BLOCK_N = 64
INT8_BLOCK_K = 128
TARGET_PROGRAMS = 264
"""Programs that fill a large GPU twice: a narrow matrix is cut along k until it has so many."""
MAX_PARTS = 16


@triton.jit
def _multiply_int8(
    out, x, data, scales, rows, outputs, inputs, x_row, steps_per_part,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    row_used, output_used = row < rows, output < outputs
    x_start = x + row.to(tl.int64)[:, None] * x_row
    w_start = data + output.to(tl.int64)[None, :] * inputs
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(part * steps_per_part, (part + 1) * steps_per_part):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        values = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
        weights = tl.load(w_start + k[:, None], mask=output_used[None, :] & (k < inputs)[:, None], other=0)
        sums += tl.dot(values, weights.to(values.dtype), input_precision="ieee")
    scale = tl.load(scales + output, mask=output_used, other=0.0)
    place = (part.to(tl.int64) * rows + row)[:, None] * outputs + output[None, :]
    tl.store(out + place, sums * scale[None, :], mask=row_used[:, None] & output_used[None, :])


@triton.jit
def _multiply_int4(
    out, x, data, scales, zeros, rows, outputs, inputs, x_row, groups, groups_per_part,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    row_used, output_used = row < rows, output < outputs
    HALF: tl.constexpr = GROUP // 2
    byte = tl.arange(0, HALF)
    x_start = x + row.to(tl.int64)[:, None] * x_row
    w_start = data + output.to(tl.int64)[None, :] * (groups * HALF)
    s_start = output.to(tl.int64) * groups
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(part * groups_per_part, tl.minimum((part + 1) * groups_per_part, groups)):
        k = group * GROUP + byte
        low_x = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
        k += HALF
        high_x = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
        packed = tl.load(w_start + group * HALF + byte[:, None], mask=output_used[None, :], other=0)
        low, high = (packed & 15).to(low_x.dtype), (packed >> 4).to(low_x.dtype)
        if HAS_ZEROS:
            zero = tl.load(zeros + s_start + group, mask=output_used, other=0).to(low_x.dtype)
            low, high = low - zero[None, :], high - zero[None, :]
        else:
            low, high = low - 8.0, high - 8.0
        scale = tl.load(scales + s_start + group, mask=output_used, other=0.0).to(tl.float32)
        product = tl.dot(low_x, low.to(low_x.dtype), input_precision="ieee")
        product += tl.dot(high_x, high.to(low_x.dtype), input_precision="ieee")
        sums += product * scale[None, :]
    place = (part.to(tl.int64) * rows + row)[:, None] * outputs + output[None, :]
    tl.store(out + place, sums, mask=row_used[:, None] & output_used[None, :])


@triton.jit
def _add_parts(out, parts, bias, count, outputs, num_parts, HAS_BIAS: tl.constexpr, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = index < count
    total = tl.zeros([TILE], tl.float32)
    place = parts + index
    for _ in range(num_parts):
        total += tl.load(place, mask=inside, other=0.0)
        place += count
    if HAS_BIAS:
        total += tl.load(bias + index % outputs, mask=inside, other=0.0)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)


def takes(weight: Tensor, scheme: WeightScheme, halves: int = 1) -> bool:
    """Whether a matrix is packed at all: unquantised ones stay as they are, for the vendor's library."""
    return scheme.kind != "float"


def pack_weight(weight: Tensor, scheme: WeightScheme, halves: int = 1) -> PackedWeight:
    """See `ops.pack_weight`: the same integers, scales and zero points, in rows."""
    outputs, inputs = weight.shape
    data, scales, zeros = _PACK[scheme.kind](weight, scheme)
    return PackedWeight(scheme, data, scales, zeros, outputs, inputs, halves, "rows")


def _pack_int8(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor, None]:
    q, scales = reference.quantize_int8(weight)
    return q.to(torch.int8), scales, None


def _pack_int4(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor, Tensor | None]:
    q, scales, zeros = reference.quantize_int4(weight, scheme)
    low, high = q.unflatten(-1, (-1, 2, scheme.group_size // 2)).unbind(-2)
    return (low | high << 4).flatten(1), scales, zeros


_PACK: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor | None]]] = {
    "int8": _pack_int8,
    "int4": _pack_int4,
}


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: Literal["silu_and_mul"] | None = None,
) -> Tensor:
    """See `ops.packed_linear`; activations keep their dtype, so there is no fast mode to tell from a precise one."""
    rows = x.flatten(0, -2)
    out = torch.empty(len(rows), weight.outputs, dtype=x.dtype, device=x.device)
    if out.numel():
        parts = _multiply(rows, weight)
        _add_parts[(triton.cdiv(out.numel(), 1024),)](
            out, parts, bias, out.numel(), weight.outputs, len(parts), HAS_BIAS=bias is not None, TILE=1024
        )
    out = out.view(*x.shape[:-1], weight.outputs)
    return silu_and_mul(out) if activation == "silu_and_mul" else out


def _multiply(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [M, K] -> float32 [parts, M, N]."""
    rows, (outputs, inputs) = len(x), (weight.outputs, weight.inputs)
    assert weight.scales is not None
    block_k = INT8_BLOCK_K if weight.scheme.kind == "int8" else weight.scheme.group_size
    steps = triton.cdiv(inputs, block_k)
    columns = triton.cdiv(outputs, BLOCK_N)
    num_parts = min(max(TARGET_PROGRAMS // columns, 1), MAX_PARTS, steps)
    steps_per_part = triton.cdiv(steps, num_parts)
    num_parts = triton.cdiv(steps, steps_per_part)
    block_m = min(max(next_power_of_2(rows), 16), 64)
    parts = torch.empty(num_parts, rows, outputs, dtype=torch.float32, device=x.device)
    grid = (columns, triton.cdiv(rows, block_m), num_parts)
    if weight.scheme.kind == "int8":
        _multiply_int8[grid](
            parts, x, weight.data, weight.scales, rows, outputs, inputs, x.stride(0), steps_per_part,
            BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=block_k, num_stages=3,
        )  # fmt: skip
    else:
        _multiply_int4[grid](
            parts, x, weight.data, weight.scales, weight.zeros, rows, outputs, inputs, x.stride(0), steps,
            steps_per_part, BLOCK_M=block_m, BLOCK_N=BLOCK_N, GROUP=block_k,
            HAS_ZEROS=weight.zeros is not None, num_stages=3,
        )  # fmt: skip
    return parts
