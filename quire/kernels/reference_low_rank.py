# SPDX-License-Identifier: Apache-2.0
"""Oracle of low-rank adapters."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.low_rank import LowRankStacks


def low_rank_linear(out: Tensor, x: Tensor, adapter_rows: Tensor, adapters: LowRankStacks, /) -> None:
    """Add the output of each row's low-rank adapter for x to out, in place (E. Hu et al., 2021, arXiv:2106.09685).

    If the adapter is affine, a row is multiplied by its factors, and its offsets are added, before.

    out [T, N] and x [T, K] of one float dtype, out contiguous. adapter_rows [T] int32 has each row's slot; a negative
    number leaves the row unchanged. An invalid slot is an IndexError on a CPU, and leaves the row unchanged on a GPU.
    Computed in float32, and rounded once, when it is added. A row's result depends on that row and its adapter alone.
    """
    slots = sorted({slot for slot in adapter_rows.tolist() if slot >= 0})
    count = len(adapters.a)
    if slots and slots[-1] >= count:
        raise IndexError(f"low_rank_linear: adapter {slots[-1]} is outside the {count} slots")
    for slot in slots:
        rows = (adapter_rows == slot).nonzero()[:, 0]
        for part, columns in enumerate(adapters.columns()):
            rank = int(adapters.ranks[slot, part])
            shrunk = x[rows].float() @ adapters.a[slot, part, :, :rank].float()
            shrunk = shrunk * adapters.scales[slot, part, :rank]
            added = shrunk @ adapters.b[slot, :rank, columns].float()
            base = out[rows, columns].float()
            if adapters.affine[slot, part]:
                base = base * adapters.factors[slot, columns] + adapters.offsets[slot, columns]
            out[rows, columns] = (base + added).to(out.dtype)
