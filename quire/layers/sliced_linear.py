# SPDX-License-Identifier: Apache-2.0
"""Row-parallel linear layers with the same bits at every tensor-parallel size (--tp-invariant).

Float sums depend on their order. So the order is fixed: inputs are cut into `NUM_SLICES`, each with its own matmul, and
results are added in the tree of `ops.all_reduce`. A rank's slices are a whole subtree: the number of ranks divides
that of the slices, and is a power of two, too.

Shapes: T tokens, K input features, N output features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn

from quire.distributed.group import Group
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.reference_collectives import tree_sum
from quire.layers.altup import GaussianTop
from quire.layers.base import Module
from quire.layers.experts import InStack, LinearInStack
from quire.layers.head_norms import SharedRMSNorm
from quire.layers.linear import Linear
from quire.layers.quantization import QuantMethod
from quire.layers.shard import WHOLE, Shard
from quire.layers.slot import Slot
from quire.layers.step import StepContext

NUM_SLICES = 4
"""Largest tensor-parallel size; a power of two."""
SLICES = "slices"
"""Name of a layer's slices in the module tree, which no checkpoint has."""


class Slice(Linear):
    """One of `NUM_SLICES` parts of a row-parallel linear layer; the first adds the bias."""

    def __init__(self, linear: Linear, place: int, shard: Shard) -> None:
        self._number = shard.rank * (NUM_SLICES // shard.of) + place
        self._place = place
        self.summed_by: Group | None = shard.group if shard.group.size > 1 else None
        """Group that all-reduces the sum of this rank's slices; None: this rank has all slices."""
        super().__init__(
            in_features=linear.inputs,
            out_features=sum(span.size for span in linear.spans),
            bias=linear.has_bias,
            dtype=linear.dtype,
            name=linear.name,
            partition="input",
            transposed=linear.transposed,
        )
        self.turns = None if linear.turns is None else replace(linear.turns)  # with slots of its own

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        """Create the slice's weights; they are the same for each number of ranks, so `shard` is ignored."""
        super().create_weights(method, Shard(self._number, NUM_SLICES))

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        """Yield slots; only the first slice's count for coverage, since all slices together read the rank's shard."""
        for name, slot in super().slots(names):
            yield name, replace(slot, shared=self._place > 0)


class SliceInStack(InStack, Slice):
    """Slice of a layer whose weight is one of a stack in the checkpoint."""

    def __init__(self, linear: Linear, place: int, shard: Shard) -> None:
        assert isinstance(linear, InStack), "a member of a stack"
        super().__init__(linear, place, shard)
        self.index, self.count, self.stack = linear.index, linear.count, linear.stack


_SLICES: dict[type, type[Slice]] = {Linear: Slice, LinearInStack: SliceInStack}


class SlicedLinear(Module):
    """This rank's slices of a row-parallel linear layer.

    Raises:
        ConfigError: there are more ranks than slices, or their number does not divide that of the slices.
    """

    def __init__(self, linear: Linear, shard: Shard) -> None:
        super().__init__()
        count, rest = divmod(NUM_SLICES, shard.of)
        if rest:
            raise ConfigError(
                f"--tp-invariant forms sums of {NUM_SLICES} slices, which"
                f" cannot be divided evenly among {shard.of} ranks"
            )
        kind = _SLICES[type(linear)]
        self.slices = nn.ModuleList(kind(linear, place, shard) for place in range(count))
        self.group = shard.group

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, K], the rank's shard -> [T, N]."""
        pieces = x.tensor_split(len(self.slices), 1)
        products = [part(piece.contiguous(), step) for part, piece in zip(self.slices, pieces, strict=True)]
        return ops.all_reduce(tree_sum(products), self.group)


def slice_sums(model: nn.Module, shard: Shard) -> None:
    """Replace each row-parallel linear layer by its slices, and make norms and top-k sum in fixed units."""
    for parent in list(model.modules()):
        if isinstance(parent, SharedRMSNorm):
            parent.by_units = parent.groups % NUM_SLICES > 0  # else each rank has whole groups
        if isinstance(parent, GaussianTop):
            parent.slices = NUM_SLICES // shard.of
        for name, child in list(parent.named_children()):
            if type(child) in _SLICES and isinstance(child, Linear) and child.partition == "input":
                setattr(parent, name, SlicedLinear(child, shard))
