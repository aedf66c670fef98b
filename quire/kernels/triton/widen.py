"""Quantised weights back to floats: a whole matrix, or the rows of a table that some ids name.

Invariant: a number comes out as what the packed one stands for, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats import format_of
from quire.kernels.linear import PackedWeight

TILE = 1024


@triton.jit
def _widen(
    out, ids, data, scales, zeros, num_rows, n, groups,
    HAS_IDS: tl.constexpr, HAS_ZEROS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """GROUP is that of an int4 weight, and 0 where a row has one scale."""
    index = tl.program_id(0).to(tl.int64)
    row = index
    if HAS_IDS:
        row = tl.load(ids + index)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tl.where((row >= 0) & (row < num_rows), k < n, False)
    if GROUP:
        HALF: tl.constexpr = GROUP // 2
        group, within = k // GROUP, k % GROUP
        packed = tl.load(data + (row * groups + group) * HALF + within % HALF, mask=inside, other=0)
        value = ((packed >> (within // HALF * 4).to(tl.uint8)) & 15).to(tl.float32)
        place = row * groups + group
        if HAS_ZEROS:
            value -= tl.load(zeros + place, mask=inside, other=0).to(tl.float32)
        else:
            value -= 8.0
        value *= tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.load(data + row * n + k, mask=inside, other=0).to(tl.float32)
        value *= tl.load(scales + row + k * 0, mask=inside, other=0.0)
    tl.store(out + index * n + k, value.to(out.dtype.element_ty), mask=k < n)


def widened(weight: PackedWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """The matrix [N, K] that an int8 or int4 weight in rows stands for, or rows ids [T] of it: [T, K].

    An id outside the matrix reads as 0.
    """
    assert weight.scheme.kind in ("int8", "int4"), "other kinds are not widened here"
    group = format_of(weight.scheme).group_in_rows(weight.scheme)
    count = weight.outputs if ids is None else len(ids)
    out = torch.empty(count, weight.inputs, dtype=dtype, device=weight.data.device)
    if out.numel():
        _widen[(count, triton.cdiv(weight.inputs, TILE))](
            out, ids, weight.data, weight.scales, weight.zeros, weight.outputs, weight.inputs,
            triton.cdiv(weight.inputs, group or 1), HAS_IDS=ids is not None, HAS_ZEROS=weight.zeros is not None,
            GROUP=group, TILE=TILE,
        )  # fmt: skip
    return out
