# SPDX-License-Identifier: Apache-2.0
"""Dense GEMM whose result for a row does not depend on the number of rows.

The vendor's library chooses its kernel, and so the order of additions, by the whole shape; here the tile follows from
the weight alone and k is processed in order. Used for `--batch-invariant` only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_K = 64, 64
GROUP_M = 8
"""Row tiles that share a column of the weight while it is in the cache."""
NUM_PROCESSORS = 132
"""Multiprocessors of a large GPU; a weight with fewer tiles of 128 outputs gets smaller ones."""


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    out, x, weight, bias, rows, outputs, inputs, x_row, w_row,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    group = tile // (GROUP_M * column_tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * column_tiles)
    row = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = within // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    row_used, output_used = row < rows, output < outputs
    x_start = x + row.to(tl.int64)[:, None] * x_row
    w_start = weight + output.to(tl.int64)[None, :] * w_row
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
        b = tl.load(w_start + k[:, None], mask=output_used[None, :] & (k < inputs)[:, None], other=0.0)
        sums += tl.dot(a, b, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output_used, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=row_used[:, None] & output_used[None, :])


def outputs_per_tile(outputs: int) -> int:
    """Return the outputs per tile: as many as still occupy a whole GPU when the rows fill one tile only."""
    return 128 if outputs >= 128 * NUM_PROCESSORS else 64


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute `ops.linear` with the same bits for a row in every batch."""
    flat, (outputs, inputs) = x.flatten(0, -2), weight.shape
    out = torch.empty(*x.shape[:-1], outputs, dtype=dtype or x.dtype, device=x.device)
    if out.numel():
        block_n = outputs_per_tile(outputs)
        grid = (triton.cdiv(len(flat), BLOCK_M) * triton.cdiv(outputs, block_n),)
        _matmul[grid](
            out, flat, weight, bias, len(flat), outputs, inputs, flat.stride(0), weight.stride(0),
            HAS_BIAS=bias is not None, BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out
