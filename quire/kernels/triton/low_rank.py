# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (E. Hu et al., 2021, arXiv:2106.09685): each row's own adapter added to a linear layer's output.

A program has a tile of adjacent rows and one slot, and exits if no row has that slot: so rows that share an adapter
read it once, and a launch depends on no data. The first launch shrinks, x @ a, with k in several parts; the second adds
these in order and expands.

Invariant: tiles and parts depend on the weight alone, and a row uses its own adapter only, so its bits do not depend on
the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.low_rank import RANK_UNIT, LowRankStacks

BLOCK_M, BLOCK_N, BLOCK_K = 16, 128, 128
MAX_PARTS = 8
"""Largest number of parts of k, of four tiles or more each: a step of few rows has no other parallelism."""


@triton.jit
def _rows_of_slot(adapter_rows, slot, rows, BLOCK_M: tl.constexpr):
    """Return the rows of this program's tile, which of them have its slot, and whether any has."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = tl.load(adapter_rows + row, mask=row < rows, other=-1) == slot
    return row, mine, tl.max(mine.to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["adapter_rows"])
def _shrink(
    shrunk, x, adapter_rows, a, ranks, rows, inputs, most, parts, x_row, steps_per_part,
    IN_FLOAT32: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    units = most // UNIT
    part, first = tl.program_id(2) // units % parts, tl.program_id(2) % units * UNIT
    of_k = tl.program_id(2) // (units * parts)
    row, mine, is_used = _rows_of_slot(adapter_rows, slot, rows, BLOCK_M)
    rank = tl.load(ranks + slot * parts + part)
    if (not is_used) | (first >= rank):
        return
    column = first + tl.arange(0, UNIT)
    x_start = x + row.to(tl.int64)[:, None] * x_row
    a_start = a + (slot * parts + part).to(tl.int64) * inputs * most + column[None, :]
    sums = tl.zeros([BLOCK_M, UNIT], tl.float32)
    for step in range(of_k * steps_per_part, (of_k + 1) * steps_per_part):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        values = tl.load(x_start + k[None, :], mask=mine[:, None] & (k < inputs)[None, :], other=0.0)
        inside = (k < inputs)[:, None] & (column < rank)[None, :]
        weights = tl.load(a_start + k.to(tl.int64)[:, None] * most, mask=inside, other=0.0)
        if IN_FLOAT32:
            values, weights = values.to(tl.float32), weights.to(tl.float32)
        sums += tl.dot(values, weights, input_precision="ieee")
    place = ((of_k.to(tl.int64) * rows + row)[:, None] * parts + part) * most + column[None, :]
    tl.store(shrunk + place, sums, mask=mine[:, None])


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["adapter_rows"])
def _expand(
    out, shrunk, adapter_rows, b, scales, ranks, affine, factors, offsets, ends, rows, outputs, most, parts, parts_of_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    row, mine, is_used = _rows_of_slot(adapter_rows, slot, rows, BLOCK_M)
    if not is_used:
        return
    begin = tl.program_id(2) * BLOCK_N
    column = begin + tl.arange(0, BLOCK_N)
    own = slot.to(tl.int64) * outputs + column
    factor, offset = tl.full([BLOCK_N], 1.0, tl.float32), tl.zeros([BLOCK_N], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in range(parts):
        from_column, to_column = tl.load(ends + part), tl.load(ends + part + 1)
        in_part = (column >= from_column) & (column < to_column)
        is_affine = tl.load(affine + slot * parts + part) != 0
        changes = (column >= from_column) & (column < tl.where(is_affine, to_column, from_column))
        factor = tl.where(changes, tl.load(factors + own, mask=changes, other=1.0), factor)
        offset = tl.where(changes, tl.load(offsets + own, mask=changes, other=0.0), offset)
        rank = tl.load(ranks + slot * parts + part)
        rank = tl.where((from_column < begin + BLOCK_N) & (begin < to_column), rank, 0)
        for first in range(0, rank, UNIT):
            r = first + tl.arange(0, UNIT)
            place = shrunk + (row.to(tl.int64)[:, None] * parts + part) * most + r[None, :]
            scale = tl.load(scales + (slot * parts + part) * most + r, mask=r < rank, other=0.0)[None, :]
            middle = tl.zeros([BLOCK_M, UNIT], tl.float32)
            for _ in range(parts_of_k):
                middle += tl.load(place, mask=mine[:, None], other=0.0)
                place += rows.to(tl.int64) * parts * most
            inside = (r < rank)[:, None] & in_part[None, :]
            b_start = b + (slot.to(tl.int64) * most + r)[:, None] * outputs + column[None, :]
            weights = tl.load(b_start, mask=inside, other=0.0).to(tl.float32)
            sums += tl.dot(middle * scale, weights, input_precision="ieee")
    place = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    inside = mine[:, None] & (column < outputs)[None, :]
    base = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    total = base * factor[None, :] + offset[None, :] + sums
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def low_rank_linear(out: Tensor, x: Tensor, adapter_rows: Tensor, adapters: LowRankStacks) -> None:
    """See `ops.low_rank_linear`; a row with an invalid slot is unchanged."""
    rows, (slots, parts, inputs, most) = len(x), adapters.a.shape
    if not rows:
        return
    num_steps = triton.cdiv(inputs, BLOCK_K)
    parts_of_k = min(MAX_PARTS, triton.cdiv(num_steps, 4))
    shrunk = torch.empty(parts_of_k, rows, parts, most, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(rows, BLOCK_M)
    _shrink[(tiles, slots, most // RANK_UNIT * parts * parts_of_k)](
        shrunk, x, adapter_rows, adapters.a, adapters.ranks, rows, inputs, most, parts, x.stride(0),
        triton.cdiv(num_steps, parts_of_k),
        IN_FLOAT32=x.dtype != adapters.a.dtype, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, UNIT=RANK_UNIT,
    )  # fmt: skip
    outputs = adapters.b.shape[-1]
    _expand[(tiles, slots, triton.cdiv(outputs, BLOCK_N))](
        out, shrunk, adapter_rows, adapters.b, adapters.scales, adapters.ranks, adapters.affine, adapters.factors,
        adapters.offsets, _ends_on_device(adapters), rows, outputs, most, parts, parts_of_k,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, UNIT=RANK_UNIT,
    )  # fmt: skip


def _ends_on_device(adapters: LowRankStacks) -> Tensor:
    """Return the parts' starts on the device, copied on first use, since a graph could not capture the copy."""
    if adapters.native is None:
        object.__setattr__(adapters, "native", adapters.ends.to(adapters.a.device, torch.int32))
    ends: Tensor = adapters.native
    return ends
