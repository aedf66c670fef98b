"""Linear layers on packed weights that stay rows: codes are widened in registers while they are multiplied.

int8 with a scale per output, and int4 with a scale (and a zero point) per output and group of k, are scaled as sums;
all other codes are multiplied as the floats that they stand for. Half of a group of 4 bits stands in the low nibbles
and half in the high ones, so that both meet activations that lie side by side. Many rows at a time are multiplied by
the vendor's library, with the weight widened once. Floats are packed, as they are, for batch-invariant products only.

Invariant: a tile of outputs and the number of parts into which k is cut depend on the matrix alone, and the parts are
added in order. Where a scheme is invariant, so is the number of rows in a tile, and nothing depends on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference
from quire.kernels.formats import format_of
from quire.kernels.linear import Ending, PackedWeight, QuantizedRows, WeightScheme
from quire.kernels.triton import fp8
from quire.kernels.triton.activation import activate, silu_and_mul
from quire.kernels.triton.codes import book_of, code_options, code_tile, has_own_product
from quire.kernels.triton.embedding import embedding
from quire.kernels.triton.launch import next_power_of_2
from quire.kernels.triton.matmul import invariant_linear
from quire.kernels.triton.quantize import quantize_rows
from quire.kernels.triton.widen import widened

BLOCK_N = 64
INT8_BLOCK_K, CODE_BLOCK_K = 128, 64
INVARIANT_BLOCK_M = 64
MAX_ROWS = 256
"""Rows beyond which widening the whole weight for the vendor's library costs less than multiplying here."""
TARGET_PROGRAMS = 264
"""Programs that fill a large GPU twice: a narrow matrix is cut along k until it has so many."""
MAX_PARTS = 16
SUM_TILE = 1024


@triton.jit(do_not_specialize=["rows"])
def _multiply_int8(
    out, x, data, scales, bias, rows, outputs, inputs, x_row, steps_per_part,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_used, output_used = row < rows, output < outputs
    x_start = x + row.to(tl.int64)[:, None] * x_row
    w_start = data + output.to(tl.int64)[None, :] * inputs
    first_step = tl.program_id(2) * steps_per_part
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first_step, first_step + steps_per_part):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        values = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
        weights = tl.load(w_start + k[:, None], mask=output_used[None, :] & (k < inputs)[:, None], other=0)
        sums += tl.dot(values, weights.to(values.dtype), input_precision="ieee")
    sums *= tl.load(scales + output, mask=output_used, other=0.0)[None, :]
    _store(out, sums, bias, row, output, rows, outputs, HAS_BIAS)


@triton.jit(do_not_specialize=["rows"])
def _multiply_int4(
    out, x, data, scales, zeros, bias, rows, outputs, inputs, x_row, groups, groups_per_part,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
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
    _store(out, sums, bias, row, output, rows, outputs, HAS_BIAS)


@triton.jit(do_not_specialize=["rows"])
def _multiply_codes(
    out, x, data, scales, zeros, book, bias, rows, outputs, inputs, x_row, steps_per_part,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * steps_per_part * BLOCK_K
    end = tl.minimum(begin + steps_per_part * BLOCK_K, inputs)
    sums = code_tile(
        x + row.to(tl.int64)[:, None] * x_row, row < rows, data, scales, zeros, book, output.to(tl.int64),
        output < outputs, begin, end, inputs, KIND, GROUP, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    _store(out, sums, bias, row, output, rows, outputs, HAS_BIAS)


@triton.jit
def _store(out, sums, bias, row, output, rows, outputs, HAS_BIAS: tl.constexpr):
    """Put a tile of this program's part into out [parts, rows, outputs]."""
    output_used = output < outputs
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output_used, other=0.0)[None, :]
    place = (tl.program_id(2).to(tl.int64) * rows + row)[:, None] * outputs + output[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & output_used[None, :])


@triton.jit
def _add_parts(out, parts, bias, outputs, num_parts, HAS_BIAS: tl.constexpr, TILE: tl.constexpr):
    """A row of each part [parts, rows, outputs], a program for some of its outputs."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    output = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = output < outputs
    total = tl.zeros([TILE], tl.float32)
    place = parts + row * outputs + output
    for _ in range(num_parts):
        total += tl.load(place, mask=inside, other=0.0)
        place += rows.to(tl.int64) * outputs
    if HAS_BIAS:
        total += tl.load(bias + output, mask=inside, other=0.0)
    tl.store(out + row * outputs + output, total.to(out.dtype.element_ty), mask=inside)


def pack_weight(weight: Tensor, scheme: WeightScheme, halves: int = 1) -> PackedWeight:
    """See `ops.pack_weight`: the same numbers, scales and zero points, in rows.

    Raises:
        ConfigError: the device does not multiply fp8.
    """
    if scheme.kind == "fp8":
        fp8.check_device(weight.device)
    return format_of(scheme).pack(weight, scheme, halves, "rows")


def packed_linear(
    x: Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: Ending | None = None,
) -> Tensor:
    """See `ops.packed_linear`; but for fp8 without groups, activations keep their dtype."""
    rows: Any = x if isinstance(x, QuantizedRows) else x.flatten(0, -2)
    multiply = _OWN.get(weight.scheme.kind, _code_linear) if has_own_product(weight) else _code_linear
    out = multiply(rows, weight, bias)
    out = out.view(*x.shape[:-1], weight.outputs)
    return out if activation is None else _ended(out, activation)


def _ended(out: Tensor, activation: Ending) -> Tensor:
    if activation == "silu_and_mul":
        return silu_and_mul(out)
    return reference.clamped_swiglu(out) if activation == "clamped_swiglu" else activate(out, activation)


def packed_embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    """See `ops.packed_embedding`; an id outside the table reads as 0, as in `embedding`."""
    if weight.scheme.kind == "float":
        return embedding(ids, weight.data).float()
    return widened(weight, torch.float32, ids)


def _float_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    return invariant_linear(x, weight.data, bias)


def _fp8_linear(x: Tensor | QuantizedRows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    assert weight.scales is not None
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x)
    scheme = weight.scheme
    vendor = scheme.vendor and not scheme.invariant and fp8.vendor_takes(weight.outputs, weight.inputs)
    multiply = fp8.vendor_linear if vendor else fp8.fp8_linear
    return multiply(rows, weight.data, weight.scales, bias)


def _code_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    if len(x) > MAX_ROWS and not weight.scheme.invariant:
        return F.linear(x, widened(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    out = torch.empty(len(x), weight.outputs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    num_parts, steps_per_part = _cut(weight)
    if num_parts == 1:
        _multiply(out, x, weight, bias, num_parts, steps_per_part)
        return out
    parts = torch.empty(num_parts, *out.shape, dtype=torch.float32, device=x.device)
    _multiply(parts, x, weight, None, num_parts, steps_per_part)
    _add_parts[(len(x), triton.cdiv(weight.outputs, SUM_TILE))](
        out, parts, bias, weight.outputs, num_parts, HAS_BIAS=bias is not None, TILE=SUM_TILE
    )
    return out


_OWN: dict[str, Callable[[Any, PackedWeight, Tensor | None], Tensor]] = {
    "float": _float_linear,
    "fp8": _fp8_linear,
}


def _block_k(weight: PackedWeight) -> int:
    if not has_own_product(weight):
        return CODE_BLOCK_K
    return format_of(weight.scheme).group_in_rows(weight.scheme) or INT8_BLOCK_K


def _cut(weight: PackedWeight) -> tuple[int, int]:
    """Into how many parts k is cut, and the steps of `_block_k` in each."""
    steps = triton.cdiv(weight.inputs, _block_k(weight))
    wanted = min(max(TARGET_PROGRAMS // triton.cdiv(weight.outputs, BLOCK_N), 1), MAX_PARTS, steps)
    steps_per_part = triton.cdiv(steps, wanted)
    return triton.cdiv(steps, steps_per_part), steps_per_part


def _multiply(
    out: Tensor, x: Tensor, weight: PackedWeight, bias: Tensor | None, num_parts: int, steps_per_part: int
) -> None:
    """x [M, K] -> out [parts, M, N]."""
    rows, (outputs, inputs) = len(x), (weight.outputs, weight.inputs)
    block_m = min(max(next_power_of_2(rows), 16), 64)
    block_m = INVARIANT_BLOCK_M if weight.scheme.invariant else block_m
    grid = (triton.cdiv(outputs, BLOCK_N), triton.cdiv(rows, block_m), num_parts)
    if not has_own_product(weight):
        _multiply_codes[grid](
            out, x, weight.data, weight.scales, weight.zeros, book_of(weight), bias, rows, outputs, inputs, x.stride(0),
            steps_per_part, HAS_BIAS=bias is not None, **code_options(weight), BLOCK_M=block_m, BLOCK_N=BLOCK_N,
            BLOCK_K=CODE_BLOCK_K, num_stages=3,
        )  # fmt: skip
    elif weight.scheme.kind == "int8":
        _multiply_int8[grid](
            out, x, weight.data, weight.scales, bias, rows, outputs, inputs, x.stride(0), steps_per_part,
            HAS_BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=INT8_BLOCK_K, num_stages=3,
        )  # fmt: skip
    else:
        group = format_of(weight.scheme).group_in_rows(weight.scheme)
        _multiply_int4[grid](
            out, x, weight.data, weight.scales, weight.zeros, bias, rows, outputs, inputs, x.stride(0),
            triton.cdiv(inputs, group), steps_per_part,
            HAS_BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=BLOCK_N, GROUP=group,
            HAS_ZEROS=weight.zeros is not None, num_stages=3,
        )  # fmt: skip
