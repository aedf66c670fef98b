"""A product with a narrow matrix, cut along k into parts that programs of their own add up.

Invariant: parts follow from the matrix and the tile alone, and are added in order, by the program that comes last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.linear import PackedWeight
from quire.kernels.triton.launch import next_power_of_2

PROGRAMS = 264
"""That fill a large GPU twice: a narrow matrix is cut along k until it has so many."""
MAX_PARTS = 16


def cut(tiles: int, steps: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """Into how many parts the steps of k are cut, where the outputs are so many tiles, and the steps in each."""
    wanted = min(max(programs // tiles, 1), MAX_PARTS, steps)
    steps_per_part = triton.cdiv(steps, wanted)
    return triton.cdiv(steps, steps_per_part), steps_per_part


def room_for_parts(out: Tensor, weight: PackedWeight, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """`parts` and `arrived` of `put`, for tiles of outputs and rows in so many parts."""
    tiles, num_parts = grid[0] * grid[1], grid[2]
    if num_parts == 1:
        return out, out
    # A matrix has its own counts, which kernels leave at 0, since its products never overlap.
    counts: Tensor | None = weight.native
    if counts is None or len(counts) < tiles:
        counts = torch.zeros(next_power_of_2(tiles), dtype=torch.int32, device=out.device)
        object.__setattr__(weight, "native", counts)
    return torch.empty(num_parts, *out.shape, dtype=torch.float32, device=out.device), counts


@triton.jit
def put(
    out, parts, arrived, sums, bias, row, output, rows, outputs, num_parts,
    HAS_BIAS: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """Put this program's sums [M, N], its part of k, into out [rows, outputs], of which all parts are added in order.

    Who comes last adds them up. arrived [tiles] counts who has come, from 0 to 0.
    """
    used = (row < rows)[:, None] & (output < outputs)[None, :]
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    if IN_PARTS:
        size, tile = (
            rows.to(tl.int64) * outputs,
            arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0),
        )
        tl.store(parts + tl.program_id(2) * size + place, sums, mask=used)
        tl.debug_barrier()  # what all threads have stored comes before the count of this program
        if tl.atomic_add(tile, 1, sem="acq_rel") < num_parts - 1:
            return
        tl.debug_barrier()
        sums = tl.zeros(sums.shape, tl.float32)
        for part in range(num_parts):
            sums += tl.load(parts + part * size + place, mask=used, other=0.0, cache_modifier=".cg")
        tl.store(tile, 0)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=used)
