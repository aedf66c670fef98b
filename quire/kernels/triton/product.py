"""A tile of a product with one matrix of several that lie one behind the other, whatever format they are kept in.

The formats are those of `quire.kernels.formats`, in rows. It serves what multiplies each row, or each head, by a matrix
of its own: experts and the matrices of heads.

Invariant: k is walked in order, in steps that follow from the format alone; so where tiles do not depend on the batch,
no bit does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.linear import PackedWeight, QuantizedRows
from quire.kernels.triton.codes import code_tile, has_own_product, in_words, product_options
from quire.kernels.triton.fp8 import PRECISE
from quire.kernels.triton.nibbles import STEP, nibble_tile
from quire.kernels.triton.quantize import quantize_rows

BLOCK_M, BLOCK_N = 64, 128
_BLOCK_K = {"float": 64, "int8": 128, "fp8": 128}
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
        sums = tl.dot(
            values, weights.to(values.dtype), sums, input_precision="ieee", max_num_imprecise_acc=PRECISE
        )
    return sums


@triton.jit
def product_tile(
    x, x_scales, row, row_stride, row_used, data, scales, zeros, book, output, output_used, matrix_outputs, inputs,
    OWN: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows [M] of x times outputs [N] of the matrices, counted from the first one's: float32 [M, N].

    What rows there are is said by `row_used`, and which outputs by `output_used`; x_scales [rows] are of E4M3 alone. A
    matrix has `matrix_outputs`.
    """
    x_start = x + (row.to(tl.int64) * row_stride)[:, None]
    output = output.to(tl.int64)
    if KIND == "int4" or KIND == "book":
        output = tl.where(output_used, output, 0)  # what is not there has the weights of another
        # Scales of a matrix are [G, N].
        groups = tl.cdiv(inputs, STEP) * (STEP // GROUP)
        start = output // matrix_outputs * (groups - 1) * matrix_outputs + output
        return nibble_tile(
            x_start, row_used, data, scales, zeros, book, output, start, matrix_outputs,
            0, tl.cdiv(inputs, STEP), inputs, OWN, PAIRS, WHOLE, KIND, GROUP, ZEROS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    elif not OWN:
        return code_tile(
            x_start, row_used, data, scales, zeros, output, output_used, 0, inputs, inputs, KIND, GROUP, ZEROS,
            BLOCK_M, BLOCK_N, BLOCK_K,
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


def format_options(weight: PackedWeight, dtype: torch.dtype) -> dict[str, Any]:
    """What a kernel with `product_tile` of rows in a dtype is compiled for: a weight's format, and the tile."""
    options = product_options(weight, dtype)
    return options | {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": _BLOCK_K.get(options["KIND"], 0) if options["OWN"] else _CODE_BLOCK_K,
        "num_warps": 8
        if in_words(weight)
        else 4,  # which take planes out of words, and have less room for sums
        "num_stages": 3,
    }
