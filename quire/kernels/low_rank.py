# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of a layer as the kernels read them.

Invariant: memory is allocated once, for the maximum number of adapters in a step; loading one writes into its slot and
moves nothing, so recorded steps keep valid addresses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu.arena import prefer_huge_pages

RANK_UNIT = 16
"""Ranks computed together by the C++ kernels: a slot is padded to a multiple of them."""


_BLOCK_BYTES = 64 << 20
_LINE = 64


class SlotMemory:
    """Zeroed memory for the slots of many layers, packed together so that a CPU uses few, huge pages.

    Unwritten memory is not committed, except on huge pages that are partly written. A tensor larger than a block gets
    its own memory.
    """

    def __init__(self, device: torch.device, block_bytes: int = _BLOCK_BYTES) -> None:
        self.device = device
        self._block_bytes = block_bytes if device.type == "cpu" else 0
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > self._block_bytes:
            return _on_huge_pages(torch.zeros(*shape, dtype=dtype, device=self.device))
        taken = -(-num_bytes // _LINE) * _LINE
        if len(self._left) < taken:
            self._left = _on_huge_pages(torch.zeros(self._block_bytes, dtype=torch.uint8))
            self._left = self._left[-self._left.data_ptr() % _LINE :]
        own, self._left = self._left[:num_bytes], self._left[taken:]
        return own.view(dtype).view(shape)


def _on_huge_pages(memory: Tensor) -> Tensor:
    if memory.device.type == "cpu":
        prefer_huge_pages(memory)
    return memory


@dataclass(frozen=True, slots=True)
class LowRankStacks:
    """S slots of a weight [N, K] that merges P parts, stacked by rows.

    `a` [S, P, K, R] and `b` [S, R, N], of one float dtype or int8: part p of slot s adds
    (x @ a[s, p] * scales[s, p]) @ b[s] in the columns of that part. Of the R ranks the first ranks[s, p] are used; the
    rest
    is undefined. If affine[s, p] is not 0, the base output in these columns is first multiplied by factors[s], and
    offsets[s] are added.
    `ends` [P + 1] int64 on the host: the start of each part in N, and N.
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    """float32 [S, P, R]: the adapter's scale times the dequantization scales of a's and b's ranks."""
    ranks: Tensor
    """int32 [S, P]; 0: the adapter adds nothing to this part."""
    affine: Tensor
    """int32 [S, P]."""
    factors: Tensor
    """float32 [S, N]."""
    offsets: Tensor
    """float32 [S, N]."""
    ends: Tensor
    input_factors: Tensor | None = None
    """float32 [S, K]: factors of the input, applied by the caller; None: none."""
    native: Any = field(default=None, init=False, repr=False, compare=False)
    """Kernels' own form, set by a device's kernels once they have checked the stacks."""

    @staticmethod
    def empty(
        num_slots: int,
        parts: Sequence[int],
        inputs: int,
        max_rank: int,
        dtype: torch.dtype,
        where: torch.device | SlotMemory,
    ) -> "LowRankStacks":
        """Return empty slots for a weight whose parts have these output counts."""
        max_rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
        ends = torch.tensor([0, *parts]).cumsum(0)
        memory = where if isinstance(where, SlotMemory) else SlotMemory(where, 0)
        device = memory.device
        return LowRankStacks(
            a=memory.zeros(num_slots, len(parts), inputs, max_rank, dtype=dtype),
            b=memory.zeros(num_slots, max_rank, sum(parts), dtype=dtype),
            scales=torch.zeros(num_slots, len(parts), max_rank, device=device),
            ranks=torch.zeros(num_slots, len(parts), dtype=torch.int32, device=device),
            affine=torch.zeros(num_slots, len(parts), dtype=torch.int32, device=device),
            factors=torch.zeros(num_slots, sum(parts), device=device),
            offsets=torch.zeros(num_slots, sum(parts), device=device),
            ends=ends,
        )

    def columns(self) -> list[slice]:
        """Return the columns of N of each part."""
        return [slice(start, end) for start, end in pairwise(self.ends.tolist())]

    def part(self, slots: slice) -> "LowRankStacks":
        """Return some of the slots, in the same memory."""
        return LowRankStacks(
            a=self.a[slots],
            b=self.b[slots],
            scales=self.scales[slots],
            ranks=self.ranks[slots],
            affine=self.affine[slots],
            factors=self.factors[slots],
            offsets=self.offsets[slots],
            ends=self.ends,
            input_factors=None if self.input_factors is None else self.input_factors[slots],
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        parts = (self.a, self.b, self.scales, self.factors, self.offsets, self.input_factors)
        return sum(part.nbytes for part in parts if part is not None)


class SharedStacks:
    """Slots of several similar layers in one memory, where a kernel indexes a layer by number."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        """Numbers of the layers."""
        self.all: LowRankStacks | None = None
        """Slots of all layers, in order; None: the engine serves no adapters."""

    def of_layer(self, index: int, num_slots: int, make: Callable[[int], LowRankStacks]) -> LowRankStacks:
        """Return a layer's slots, by its number; `make(count)` allocates those of all layers on the first call."""
        place = self.numbers.index(index)
        if place == 0:
            self.all = make(len(self.numbers) * num_slots)
        assert self.all is not None, "layers ask in their order"
        return self.all.part(slice(place * num_slots, (place + 1) * num_slots))
