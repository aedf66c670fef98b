# SPDX-License-Identifier: Apache-2.0
"""Mapping of checkpoint tensor parts to parameters of a layer.

Invariant: the regions of a tensor's slots cover it, each element once unless its slots are shared. A slot reads a box
inside its region; other ranks read the rest of the region with the same slot.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Literal

import torch
from torch import Tensor

Box = tuple[slice, ...]
"""Range with start and stop for each dimension."""
Init = Literal["normal", "ones", "zeros"]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def length(side: slice) -> int:
    """Return the number of indices of a range."""
    return int(side.stop - side.start)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(map(length, box))


@dataclass(frozen=True)
class TensorPart:
    """Part of a stored tensor of shape `shape` that a slot reads: `box`, which lies in `region`.

    `stored` is the shape in the file if it differs for the same elements; all parts of a tensor use one shape.
    """

    shape: tuple[int, ...]
    region: Box
    box: Box
    stored: tuple[int, ...] | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.shape if self.stored is None else self.stored

    @staticmethod
    def all(shape: Sequence[int]) -> "TensorPart":
        """Return the part with every element of a tensor."""
        everything = tuple(slice(0, size) for size in shape)
        return TensorPart(tuple(shape), everything, everything)

    @property
    def is_whole(self) -> bool:
        """True if other slots or ranks read nothing of the tensor."""
        return sizes(self.box) == self.shape

    def transposed(self) -> "TensorPart":
        """Return the same part of the transposed tensor."""
        return TensorPart(self.shape[::-1], self.region[::-1], self.box[::-1])

    def in_stack(self, index: int, count: int, dim: int = 0) -> "TensorPart":
        """Return the same part of one tensor in a stack of `count` along a new dimension."""
        side = slice(index, index + 1)
        shape = (*self.shape[:dim], count, *self.shape[dim:])
        region, box = ((*sides[:dim], side, *sides[dim:]) for sides in (self.region, self.box))
        return TensorPart(shape, region, box, None if self.stored is None else (count, *self.stored))

    def narrow(self, dim: int, start: int, stop: int) -> "TensorPart":
        """Return the part from `start` to `stop` of the box along a dimension."""
        first = self.box[dim].start
        side = slice(first + start, first + stop)
        return replace(self, box=(*self.box[:dim], side, *self.box[dim + 1 :]))


@dataclass(frozen=True)
class Slot:
    """Destination of a part of one checkpoint tensor: a view of a parameter.

    `part` is None if the slot takes a whole tensor of the target's shape. `dtypes` are those that the file may hold.
    `convert` makes the target's values, except for their dtype, from rows of the part (its first dimension), one from
    each:
    an offset, or unpacked integers. `init` fills the target under random weights. `adopt` is set if the layer reads the
    part once, in `finish_loading`, and so needs no copy of it. Other slots may read the part of a `shared` slot as
    well.
    """

    target: Tensor
    init: Init
    part: TensorPart | None = None
    dtypes: Collection[torch.dtype] = FLOATS
    convert: Callable[[Tensor], Tensor] | None = None
    adopt: Callable[[Tensor], None] | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        taken, given = sizes(self.source.box), tuple(self.target.shape)
        assert taken == given or (self.convert is not None and taken[:1] == given[:1]), (taken, given)
        assert self.adopt is None or self.convert is None, "an adopted tensor is not converted"

    @property
    def source(self) -> TensorPart:
        """Part of the tensor that the slot reads."""
        return TensorPart.all(self.target.shape) if self.part is None else self.part

    def fill(self, tensor: Tensor) -> None:
        """Store the part: by reference if `adopt` can take it, else copied in the target's dtype."""
        if self.adopt is not None and tensor.dtype == self.target.dtype:
            self.adopt(tensor)
        else:
            self.target.copy_(tensor if self.convert is None else self.convert(tensor))

    def narrow(self, dim: int, start: int, stop: int) -> "Slot":
        """Return the slot for the range from `start` to `stop` of the part along a dimension."""
        assert dim == 0 or self.convert is None, "rows are converted whole"
        target, part = self.target.narrow(dim, start, stop - start), self.source.narrow(dim, start, stop)
        return replace(self, target=target, part=part, adopt=None)

    def left(self) -> "Slot":
        """Return the slot of a rank that reads nothing because another rank holds the part; the region stays."""
        region = self.source.region
        box = tuple(slice(side.start, side.start) for side in region)
        return replace(
            self,
            target=torch.empty(sizes(box), dtype=self.target.dtype),
            part=replace(self.source, box=box),
            convert=None,
            adopt=None,
        )

    def of_stack(self, index: int, count: int, dim: int = 0) -> "Slot":
        """Return the slot for a stack of `count` such tensors along a new dimension, this one at `index`."""
        assert self.convert is None, "conversion is by rows, and the rows of a stack are its members"
        adopt = self.adopt
        alone = None if adopt is None else lambda tensor: adopt(tensor.squeeze(dim))
        part = self.source.in_stack(index, count, dim)
        return replace(self, target=self.target.unsqueeze(dim), part=part, adopt=alone)

    def merging(self, dim: int) -> "Slot":
        """Return the slot for a file in which this dimension and the next are merged."""
        shape = self.source.shape
        merged = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        return replace(self, part=replace(self.source, stored=merged))


def uncovered_reason(shape: Sequence[int], regions: Sequence[Box]) -> str | None:
    """Return why the regions do not cover a tensor of this shape exactly once, as a phrase; None if they do."""
    for one, other in combinations(regions, 2):
        if all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(one, other, strict=True)):
            return f"{_text(one)} and {_text(other)} of it overlap"
    if any(side.stop > size for box in regions for side, size in zip(box, shape, strict=True)):
        return f"{', '.join(map(_text, regions))} reach beyond it"
    missing = prod(shape) - sum(prod(sizes(box)) for box in regions)
    return f"{missing} elements beside {', '.join(map(_text, regions))} have no place" if missing else None


def _text(box: Box) -> str:
    return f"[{', '.join(f'{side.start}:{side.stop}' for side in box)}]"
