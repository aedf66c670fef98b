"""A tile of a product with one matrix of several that lie one behind the other, whatever format they are kept in.

The formats are those of `quire.kernels.formats`, in rows. It serves what multiplies each row, or each head, by a matrix
of its own: experts and the matrices of heads.

Invariant: k is walked in order, in steps that follow from the format alone; so where tiles do not depend on the batch,
no bit does.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.linear import PackedWeight, QuantizedRows
from quire.kernels.triton.codes import code_options, code_tile, has_own_product
from quire.kernels.triton.quantize import quantize_rows

BLOCK_M, BLOCK_N = 64, 128
_BLOCK_K = {"float": 64, "int8": 128, "fp8": 128, "int4": 0}
_CODE_BLOCK_K = 64


@triton.jit
def _float_tile(
    x_start, row_used, w_start, output_used, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Also of numbers that are scaled afterwards."""
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        values = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
        weights = tl.load(w_start + k[:, None], mask=output_used[None, :] & (k < inputs)[:, None], other=0.0)
        sums = tl.dot(values, weights.to(values.dtype), sums, input_precision="ieee")
    return sums


@triton.jit
def _int4_tile(
    x_start, row_used, data, scales, zeros, output, output_used, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = GROUP // 2
    byte = tl.arange(0, HALF)
    groups = tl.cdiv(inputs, GROUP)
    w_start, s_start = data + (output * (groups * HALF))[None, :], output * groups
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(groups):
        k = group * GROUP + byte
        low_x = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
        k += HALF
        high_x = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
        packed = tl.load(w_start + group * HALF + byte[:, None], mask=output_used[None, :], other=0)
        low, high = (packed & 15).to(low_x.dtype), (packed >> 4).to(low_x.dtype)
        if HAS_ZEROS:
            zero = tl.load(zeros + s_start + group, mask=output_used, other=0).to(low_x.dtype)[None, :]
            low, high = low - zero, high - zero
        else:
            low, high = low - 8.0, high - 8.0
        scale = tl.load(scales + s_start + group, mask=output_used, other=0.0).to(tl.float32)
        product = tl.dot(low_x, low.to(low_x.dtype), input_precision="ieee")
        product = tl.dot(high_x, high.to(low_x.dtype), product, input_precision="ieee")
        sums += product * scale[None, :]
    return sums


@triton.jit
def product_tile(
    x, x_scales, row, row_stride, row_used, data, scales, zeros, book, output, output_used, inputs,
    OWN: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows [M] of x times outputs [N] of the matrices, counted from the first one's: float32 [M, N].

    What rows there are is said by `row_used`, and which outputs by `output_used`; x_scales [rows] are of E4M3 alone.
    """
    x_start = x + (row.to(tl.int64) * row_stride)[:, None]
    output = output.to(tl.int64)
    if not OWN:
        return code_tile(
            x_start, row_used, data, scales, zeros, book, output, output_used, 0, inputs, inputs, KIND, GROUP, ZEROS,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif KIND == "int4":
        return _int4_tile(
            x_start, row_used, data, scales, zeros, output, output_used, inputs, BLOCK_M, BLOCK_N, GROUP, ZEROS == 1
        )  # fmt: skip
    else:
        w_start = data + (output * inputs)[None, :]
        sums = _float_tile(x_start, row_used, w_start, output_used, inputs, BLOCK_M, BLOCK_N, BLOCK_K)
        if KIND == "fp8":
            sums *= tl.load(x_scales + row, mask=row_used, other=0.0)[:, None]
        if KIND != "float":
            sums *= tl.load(scales + output, mask=output_used, other=0.0)[None, :]
        return sums


def as_multiplied(x: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor | None]:
    """Rows [T, K] as a weight multiplies them, and their scales, if there are any."""
    if weight.scheme.kind != "fp8" or not has_own_product(weight):
        return x, None
    rows: QuantizedRows = quantize_rows(x)
    return rows.values, rows.scales


def format_options(weight: PackedWeight) -> dict[str, Any]:
    """What a kernel with `product_tile` is compiled for: a weight's format, and the tile."""
    own, options = has_own_product(weight), code_options(weight)
    return options | {
        "OWN": own,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": _BLOCK_K[options["KIND"]] if own else _CODE_BLOCK_K,
        "num_warps": 4,
        "num_stages": 3,
    }
