"""RMS norms of rows of which each rank has some units, such as heads.

What is normed as a whole may be shared by ranks, and its sum of squares is one nevertheless: a unit's is formed by
itself, all ranks see those of all units, and add them up in the same order. So the sum has the same bits at every
number of ranks, and in every batch, since each step of it is an operation on single elements.

Shapes: T tokens of the step, u units of size D, those of a rank; U all of them.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.kernels import ops
from quire.layers.shard import WHOLE, Shard, Span
from quire.layers.vectors import Vector, VectorLayer

if TYPE_CHECKING:
    from quire.layers.quantization import QuantMethod


class SharedRMSNorm(VectorLayer):
    """`x / rms(x) * weight`, over each of `groups` equal parts of a row's units.

    Of a rank that has whole groups it is one pass over them. Where a group is shared, and `by_units` if no number of
    ranks may change a bit, sums of units cross ranks.
    """

    vectors = (Vector("weight", "weight", "ones"),)
    weight: Tensor
    ones: Tensor

    def __init__(self, span: Span, *, groups: int = 1, eps: float, dtype: torch.dtype, name: str) -> None:
        self.groups, self.group_size, self.by_units = groups, span.size // groups, False
        super().__init__(span, dtype=dtype, name=name)
        self.register_buffer("ones", torch.ones(self.group_size, dtype=dtype, device="cpu"), persistent=False)
        self.eps = eps

    def create_weights(self, method: "QuantMethod | None", shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self.is_summed = self.by_units or (shard.of > 1 and self.groups % shard.of > 0)
        self.group: Group | None = shard.group if self.is_summed and shard.group.size > 1 else None
        own = range(self.own.start // self.span.unit, self.own.stop // self.span.unit)
        self.num_units, self.per_group = len(own), self.span.units // self.groups
        self.groups_of_own = [unit // self.per_group for unit in own]
        self.copies = max(shard.of // self.span.units, 1)
        """How many ranks have the same unit."""

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""
        return None if self.group is None else self.group.why_not_captured()

    def forward(self, x: Tensor) -> Tensor:
        """x [T, u * D] or [T, u, D] -> the same shape."""
        if self.is_summed:
            return self._by_units(x.reshape(len(x), self.num_units, self.span.unit)).view(x.shape)
        row = self.num_units * self.span.unit
        if row == self.group_size:
            return ops.rms_norm(x.reshape(len(x), row), self.weight, self.eps).view(x.shape)
        normed = ops.rms_norm(x.reshape(len(x), row // self.group_size, self.group_size), self.ones, self.eps)
        return (normed.view(len(x), row) * self.weight).view(x.shape)

    def _by_units(self, x: Tensor) -> Tensor:
        """x [T, u, D] -> the same shape."""
        wide = x.float()
        means = self._means(added_up(wide * wide))
        normed = wide * (1.0 / (means + self.eps).sqrt())[:, :, None]
        return (normed * self.weight.view(-1, self.span.unit)).to(x.dtype)

    def _means(self, sums: Tensor) -> Tensor:
        """Of the squares of a rank's units [T, u], those of the groups that they are in [T, u]."""
        if self.group is not None:
            sums = ops.all_gather(sums, self.group)[:, :: self.copies]
        totals = added_up(sums.reshape(len(sums), self.groups, self.per_group)) / self.group_size
        if self.groups == 1:
            return totals
        return torch.stack([totals[:, group] for group in self.groups_of_own], 1)


def added_up(x: Tensor) -> Tensor:
    """[..., N] -> [...]: neighbours that are half of N apart, and so on, whatever the other dimensions are."""
    while (count := x.shape[-1]) > 1:
        half = count // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((pairs, x[..., 2 * half :]), -1) if count % 2 else pairs
    return x[..., 0]
