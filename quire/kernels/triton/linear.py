# SPDX-License-Identifier: Apache-2.0
"""Linear layers on packed weights in rows: codes are decoded in registers while they are multiplied.

int8 with a scale per output, and int4 with a scale (and a zero point) per output and group of k, scale the sums; all
other codes are decoded to floats first. Many rows are multiplied by the vendor's library, after dequantizing the weight
once. Floats are packed, unchanged, for batch-invariant matmuls only.

Invariant: parts of a split k are added in order, by the last program. If a scheme is invariant, tiles and parts depend
on the weight alone, and nothing on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference
from quire.kernels.formats import format_of
from quire.kernels.linear import FusedActivation, PackedWeight, QuantizedRows, WeightScheme
from quire.kernels.triton import quantize
from quire.kernels.triton.codes import (
    STEP,
    book_of,
    code_options,
    code_tile,
    has_own_matmul,
    in_words,
    matmul_options,
    nibble_tile,
    widened,
)
from quire.kernels.triton.elementwise import activate, embedding, silu_and_mul
from quire.kernels.triton.launch import next_power_of_2
from quire.kernels.triton.matmul import invariant_linear
from quire.kernels.triton.primitives import PROGRAMS, put, room_for_parts, split_k
from quire.kernels.triton.quantize import quantize_rows

MAX_ROWS = 256
"""Row count beyond which dequantizing the whole weight for the vendor's library is cheaper than multiplying here."""
MANY_OUTPUTS = 128 * 132
"""Outputs that fill a large GPU with tiles of 128."""


class Tile(NamedTuple):
    """Rows, outputs and k of a program, and its launch options."""

    rows: int
    outputs: int
    k: int
    num_warps: int = 4
    num_stages: int = 3
    programs: int = PROGRAMS


def tile_of(weight: PackedWeight, rows: int, dtype: torch.dtype) -> Tile:
    """Return the fastest tile found on an H100; for an invariant scheme, one for all numbers of rows."""
    if weight.scheme.invariant:
        return Tile(64, 64, _step(weight))
    if has_own_matmul(weight) and dtype.itemsize == 2:
        return (_tile_of_words if in_words(weight) else _tile_of_bytes)(weight, rows)
    return Tile(min(_filled(rows), 64), 64, _step(weight))  # larger tiles would not fit into shared memory


def _tile_of_words(weight: PackedWeight, rows: int) -> Tile:
    """Return the tile for int4. Sums of small groups stall so often that several small programs outperform a
    large one."""
    if rows <= 16:
        return Tile(16, 64, STEP.value, programs=2 * PROGRAMS)
    small_groups, wide = code_options(weight)["GROUP"] < 128, weight.outputs >= MANY_OUTPUTS
    if wide and (rows > 64 or not small_groups):
        return Tile(min(_filled(rows), 128), 128, STEP.value, num_warps=8)
    return Tile(min(_filled(rows), 64 if small_groups else 128), 64, STEP.value)


def _tile_of_bytes(weight: PackedWeight, rows: int) -> Tile:
    """Return the tile for int8."""
    if rows <= 16:
        return Tile(16, 32, 256, num_stages=4)
    if rows > 128:
        return Tile(256, 128, 64, num_warps=8, programs=PROGRAMS // 2)
    wide = 32 < rows <= 64 and weight.outputs >= MANY_OUTPUTS
    return Tile(_filled(rows), 128 if wide else 64, 128, num_warps=8 if wide else 4)


def _filled(rows: int) -> int:
    """Return the row count of the smallest supported tile that holds this many rows."""
    return max(next_power_of_2(rows), 16)


def _step(weight: PackedWeight) -> int:
    """Return the usual k of a tile."""
    if in_words(weight):
        return STEP.value
    return 128 if has_own_matmul(weight) else 64


@triton.jit(do_not_specialize=["rows"])
def _multiply_int8(
    out, parts, arrived, x, data, scales, bias, rows, outputs, inputs, x_row, steps_per_part, num_parts,
    HAS_BIAS: tl.constexpr, IN_PARTS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_used, output_used = row < rows, output < outputs
    x_start = x + row.to(tl.int64)[:, None] * x_row
    w_start = data + tl.where(output_used, output, 0).to(tl.int64)[:, None] * inputs
    first_step = tl.program_id(2) * steps_per_part
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # weights are the rows of the matmul: see `codes`
    for step in range(first_step, tl.minimum(first_step + steps_per_part, tl.cdiv(inputs, BLOCK_K))):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if WHOLE:
            values = tl.load(x_start + k[None, :], mask=row_used[:, None], other=0.0)
            weights = tl.load(w_start + k[None, :])
        else:
            values = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
            weights = tl.load(w_start + k[None, :], mask=(k < inputs)[None, :], other=0)
        sums = tl.dot(weights.to(values.dtype), tl.trans(values), sums, input_precision="ieee")
    sums = tl.trans(sums * tl.load(scales + output, mask=output_used, other=0.0)[:, None])
    put(out, parts, arrived, sums, bias, row, output, rows, outputs, num_parts, HAS_BIAS, IN_PARTS)


@triton.jit(do_not_specialize=["rows"])
def _multiply_nibbles(
    out, parts, arrived, x, data, scales, zeros, book, bias, rows, outputs, inputs, x_row, steps_per_part, num_parts,
    HAS_BIAS: tl.constexpr, IN_PARTS: tl.constexpr, OWN: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.where(output < outputs, output, 0).to(tl.int64)  # outputs out of range read another's weights
    first_step = tl.program_id(2) * steps_per_part
    end_step = tl.minimum(first_step + steps_per_part, tl.cdiv(inputs, STEP))
    sums = nibble_tile(
        x + row.to(tl.int64)[:, None] * x_row, row < rows, data, scales, zeros, book, read, read, outputs,
        first_step, end_step, inputs, OWN, PAIRS, WHOLE, KIND, GROUP, ZEROS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    put(out, parts, arrived, sums, bias, row, output, rows, outputs, num_parts, HAS_BIAS, IN_PARTS)


@triton.jit(do_not_specialize=["rows"])
def _multiply_codes(
    out, parts, arrived, x, data, scales, zeros, bias, rows, outputs, inputs, x_row, steps_per_part, num_parts,
    HAS_BIAS: tl.constexpr, IN_PARTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * steps_per_part * BLOCK_K
    end = tl.minimum(begin + steps_per_part * BLOCK_K, inputs)
    sums = code_tile(
        x + row.to(tl.int64)[:, None] * x_row, row < rows, data, scales, zeros, output.to(tl.int64),
        output < outputs, begin, end, inputs, KIND, GROUP, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    put(out, parts, arrived, sums, bias, row, output, rows, outputs, num_parts, HAS_BIAS, IN_PARTS)


def pack_weight(weight: Tensor, scheme: WeightScheme, halves: int = 1) -> PackedWeight:
    """See `ops.pack_weight`: the same numbers, scales and zero points, in rows.

    Raises:
        ConfigError: the device does not multiply fp8.
    """
    if scheme.kind == "fp8":
        quantize.check_device(weight.device)
    return format_of(scheme).pack(weight, scheme, halves, "rows")


def packed_linear(
    x: Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: FusedActivation | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See `ops.packed_linear`; activations keep their dtype, except for fp8 without groups."""
    rows: Any = x if isinstance(x, QuantizedRows) else x.flatten(0, -2)
    multiply = _OWN.get(weight.scheme.kind, _code_linear) if has_own_matmul(weight) else _code_linear
    out = multiply(rows, weight, bias, dtype or x.dtype)
    out = out.view(*x.shape[:-1], weight.outputs)
    return out if activation is None else _ended(out, activation)


def _ended(out: Tensor, activation: FusedActivation) -> Tensor:
    if activation == "silu_and_mul":
        return silu_and_mul(out)
    return reference.clamped_swiglu(out) if activation == "clamped_swiglu" else activate(out, activation)


def packed_embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    """See `ops.packed_embedding`; an id outside the table reads as 0, as in `embedding`."""
    if weight.scheme.kind == "float":
        return embedding(ids, weight.data).float()
    return widened(weight, torch.float32, ids)


def _float_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return invariant_linear(x, weight.data, bias, dtype)


def _fp8_linear(
    x: Tensor | QuantizedRows, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    assert weight.scales is not None
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x)
    scheme = weight.scheme
    may = scheme.vendor and not scheme.invariant
    if may and quantize.vendor_takes(rows.shape[0], weight.outputs, weight.inputs, dtype):
        return quantize.vendor_linear(rows, weight.data, weight.scales, bias)
    return quantize.fp8_linear(rows, weight, bias, dtype)


def _code_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if len(x) > MAX_ROWS and not weight.scheme.invariant:
        return reference.linear(x, widened(weight, x.dtype), bias, dtype)
    out = torch.empty(len(x), weight.outputs, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    _multiply(out, x, weight, bias)
    return out


_OWN: dict[str, Callable[[Any, PackedWeight, Tensor | None, torch.dtype], Tensor]] = {
    "float": _float_linear,
    "fp8": _fp8_linear,
}


def _multiply(out: Tensor, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> None:
    """x [M, K] -> out [M, N]."""
    rows, (outputs, inputs) = len(x), (weight.outputs, weight.inputs)
    tile = tile_of(weight, rows, x.dtype)
    num_parts, steps_per_part = split_k(
        triton.cdiv(outputs, tile.outputs), triton.cdiv(inputs, tile.k), tile.programs
    )
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows), num_parts)
    parts, arrived = room_for_parts(out, weight, grid)
    sizes = bias, rows, outputs, inputs, x.stride(0), steps_per_part, num_parts
    variant = {
        "HAS_BIAS": bias is not None,
        "IN_PARTS": num_parts > 1,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    places = out, parts, arrived, x, weight.data, weight.scales
    if in_words(weight):
        options = matmul_options(weight, x.dtype)
        _multiply_nibbles[grid](*places, weight.zeros, book_of(weight), *sizes, **options, **variant)
    elif has_own_matmul(weight):
        _multiply_int8[grid](*places, *sizes, WHOLE=inputs % tile.k == 0, **variant, BLOCK_K=tile.k)
    else:
        _multiply_codes[grid](
            *places, weight.zeros, *sizes, **code_options(weight), **variant, BLOCK_K=tile.k
        )
