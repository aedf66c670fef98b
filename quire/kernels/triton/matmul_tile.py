# SPDX-License-Identifier: Apache-2.0
"""Matmul tile with one of several contiguous weights, in any format of `quire.kernels.formats`, in rows.

Used where each row, or each head, has its own weight: experts and per-head linear layers.

Invariant: k is processed in order, in steps that follow from the format alone; so if tiles do not depend on the batch,
no bit does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.linear import PackedWeight, QuantizedRows
from quire.kernels.triton.codes import STEP, code_tile, has_own_matmul, in_words, matmul_options, nibble_tile
from quire.kernels.triton.quantize import PRECISE, quantize_rows

BLOCK_M, BLOCK_N = 64, 128
_BLOCK_K = {"float": 64, "int8": 128, "fp8": 128}
_CODE_BLOCK_K = 64


@triton.jit
def _float_tile(
    x_start, row_used, w_start, output_used, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a tile of floats, or of numbers that are scaled afterwards."""
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
def matmul_tile(
    x, x_scales, row, row_stride, row_used, data, scales, zeros, book, output, output_used, matrix_outputs, inputs,
    OWN: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows [M] of x with outputs [N] of the weights, counted from the first weight's: float32 [M, N].

    `row_used` and `output_used` are the masks; x_scales [rows] are for E4M3 only. A weight has `matrix_outputs`.
    """
    x_start = x + (row.to(tl.int64) * row_stride)[:, None]
    output = output.to(tl.int64)
    if KIND == "int4" or KIND == "book":
        output = tl.where(output_used, output, 0)  # outputs out of range read another's weights
        # A weight's scales are [G, N].
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
    """Return rows [T, K] as a weight multiplies them, and their scales, if any."""
    if weight.scheme.kind != "fp8" or not has_own_matmul(weight):
        return x, None
    rows: QuantizedRows = quantize_rows(x)
    return rows.values, rows.scales


def format_options(weight: PackedWeight, dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile-time options of a kernel with `matmul_tile` for rows of a dtype: format and tile."""
    options = matmul_options(weight, dtype)
    return options | {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": _BLOCK_K.get(options["KIND"], 0) if options["OWN"] else _CODE_BLOCK_K,
        "num_warps": 8
        if in_words(weight)
        else 4,  # they extract planes of words, and have less space for sums
        "num_stages": 3,
    }
