"""Activations of which a share of each row is cut off, by what all of the row is like.

Shapes: T tokens of the step, I features, or those of a rank.
"""

from __future__ import annotations

from statistics import NormalDist

from torch import Tensor

from quire.distributed.group import ALONE, Group
from quire.kernels import ops
from quire.kernels.reference_collectives import tree_sum
from quire.layers.base import Module
from quire.layers.shard import Shard
from quire.layers.shared_norm import added_up


class GaussianTop(Module):
    """What is above the quantile `sparsity` of each row, less that, and 0 below, were a row's elements normal.

    Statistical top-k (Gemma 3n, 2025; Bui et al., 2025, arXiv:2506.06644). Of a row that ranks share each sums up its
    part, and all see all sums.
    """

    def __init__(self, sparsity: float) -> None:
        super().__init__()
        self.deviations = NormalDist().inv_cdf(sparsity)
        self.slices = 0
        """Equal parts of what a rank has of a row, of which each is summed up by itself; 0: nobody shares the row."""
        self.group: Group = ALONE

    def take_share(self, shard: Shard) -> None:
        self.group, self.slices = shard.group, max(self.slices, 1)

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""
        return None if self.group.size == 1 else self.group.why_not_captured()

    def forward(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, I]."""
        mean = self._mean(x)
        spread = self._mean((x - mean).square()).sqrt()
        return ops.activate(x - (mean + self.deviations * spread), function="relu")

    def _mean(self, x: Tensor) -> Tensor:
        """Of whole rows, [T, 1]."""
        if not self.slices:
            return x.mean(-1, keepdim=True)
        sums = added_up(x.float().reshape(len(x), self.slices, -1))
        if self.group.size > 1:
            sums = ops.all_gather(sums, self.group)
        total = tree_sum(sums.unbind(1)) / (x.shape[1] * self.group.size)
        return total[:, None].to(x.dtype)
