"""Quantised weights back to floats: a whole matrix, or the rows of a table that some ids name.

Invariant: a number comes out as what the packed one stands for, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.linear import PackedWeight
from quire.kernels.triton.codes import book_of, code_options, weights_at

TILE = 1024


@triton.jit
def _widen(
    out, ids, data, scales, zeros, book, num_rows, n,
    HAS_IDS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = index
    if HAS_IDS:
        row = tl.load(ids + index)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tl.where((row >= 0) & (row < num_rows), k < n, False)
    value = weights_at(data, scales, zeros, book, row, k, inside, num_rows, n, KIND, GROUP, ZEROS)
    tl.store(out + index * n + k, value.to(out.dtype.element_ty), mask=k < n)


def widened(weight: PackedWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """The matrix [N, K] that a weight of codes in rows stands for, or rows ids [T] of it: [T, K].

    An id outside the matrix reads as 0.
    """
    options = code_options(weight)
    count = weight.outputs if ids is None else len(ids)
    out = torch.empty(count, weight.inputs, dtype=dtype, device=weight.data.device)
    if out.numel():
        _widen[(count, triton.cdiv(weight.inputs, TILE))](
            out, ids, weight.data, weight.scales, weight.zeros, book_of(weight), weight.outputs, weight.inputs,
            HAS_IDS=ids is not None, **options, TILE=TILE,
        )  # fmt: skip
    return out
