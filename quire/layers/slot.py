"""Which part of a checkpoint's tensor goes where in a layer.

Invariant: the regions of a tensor's slots cover it, each element once unless its slots are shared. What a slot takes
lies in its region; the rest of the region is what the same slot takes on other ranks, and is knowingly left to them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Literal

import torch
from torch import Tensor

Box = tuple[slice, ...]
"""A range, with start and stop, of each dimension."""
Init = Literal["normal", "ones", "zeros"]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def length(side: slice) -> int:
    """Number of indices of a range."""
    return int(side.stop - side.start)


def sizes(box: Box) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(map(length, box))


@dataclass(frozen=True)
class Part:
    """What a slot takes of a tensor in the file, whose whole shape is `shape`: `box`, which lies in `region`.

    A file may name another shape of the same elements, `stored`; all parts of a tensor see it in one shape.
    """

    shape: tuple[int, ...]
    region: Box
    box: Box
    stored: tuple[int, ...] | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """What the file says."""
        return self.shape if self.stored is None else self.stored

    @staticmethod
    def all(shape: Sequence[int]) -> "Part":
        """Every element of a tensor."""
        everything = tuple(slice(0, size) for size in shape)
        return Part(tuple(shape), everything, everything)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the tensor is left to other slots or ranks."""
        return sizes(self.box) == self.shape

    def transposed(self) -> "Part":
        """The same of a tensor that is stored with its dimensions the other way round."""
        return Part(self.shape[::-1], self.region[::-1], self.box[::-1])

    def in_stack(self, index: int, count: int, dim: int = 0) -> "Part":
        """The same of a tensor in which so many such tensors stand, side by side along a new dimension."""
        side = slice(index, index + 1)
        shape = (*self.shape[:dim], count, *self.shape[dim:])
        region, box = ((*sides[:dim], side, *sides[dim:]) for sides in (self.region, self.box))
        return Part(shape, region, box, None if self.stored is None else (count, *self.stored))

    def narrow(self, dim: int, start: int, stop: int) -> "Part":
        """From `start` to `stop` of the box along a dimension."""
        first = self.box[dim].start
        side = slice(first + start, first + stop)
        return replace(self, box=(*self.box[:dim], side, *self.box[dim + 1 :]))


@dataclass(frozen=True)
class Slot:
    """The place of a part of one checkpoint tensor: a view of a parameter.

    `part` is None if the slot takes a whole tensor of the target's shape. `dtypes` are those that the file may hold.
    `convert`, if there is one, makes what the target is to hold, but for its dtype, from rows of the part (its first
    dimension), one row from each: an offset, integers out of packed ones. `init` is what random weights put into the
    target instead. `adopt` is there if the layer reads the part once, in `finish_loading`, and so needs no copy of it.
    A `shared` slot takes what others may take as well.
    """

    target: Tensor
    init: Init
    part: Part | None = None
    dtypes: Collection[torch.dtype] = FLOATS
    convert: Callable[[Tensor], Tensor] | None = None
    adopt: Callable[[Tensor], None] | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        taken, given = sizes(self.source.box), tuple(self.target.shape)
        assert taken == given or (self.convert is not None and taken[:1] == given[:1]), (taken, given)
        assert self.adopt is None or self.convert is None, "what is adopted is as the file has it"

    @property
    def source(self) -> Part:
        """What it takes of the tensor."""
        return Part.all(self.target.shape) if self.part is None else self.part

    def fill(self, tensor: Tensor) -> None:
        """Take the part, as the file has it: itself where that will do, else a copy in the target's dtype."""
        if self.adopt is not None and tensor.dtype == self.target.dtype:
            self.adopt(tensor)
        else:
            self.target.copy_(tensor if self.convert is None else self.convert(tensor))

    def narrow(self, dim: int, start: int, stop: int) -> "Slot":
        """The slot of what lies from `start` to `stop` of the part along a dimension."""
        assert dim == 0 or self.convert is None, "rows are converted whole"
        target, part = self.target.narrow(dim, start, stop - start), self.source.narrow(dim, start, stop)
        return replace(self, target=target, part=part, adopt=None)

    def left(self) -> "Slot":
        """That of another rank which takes the part: nothing of the same region."""
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
        """The same of a tensor in which so many such tensors stand along a new dimension, this one at `index`."""
        assert self.convert is None, "rows of a stack would be its members"
        adopt = self.adopt
        alone = None if adopt is None else lambda tensor: adopt(tensor.squeeze(dim))
        part = self.source.in_stack(index, count, dim)
        return replace(self, target=self.target.unsqueeze(dim), part=part, adopt=alone)

    def merging(self, dim: int) -> "Slot":
        """The same of a file in which this dimension and the next are one."""
        shape = self.source.shape
        merged = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        return replace(self, part=replace(self.source, stored=merged))


def why_not_covered(shape: Sequence[int], regions: Sequence[Box]) -> str | None:
    """Why regions do not cover a tensor of such a shape, each element once: a phrase; None if they do."""
    for one, other in combinations(regions, 2):
        if all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(one, other, strict=True)):
            return f"{_text(one)} and {_text(other)} of it overlap"
    if any(side.stop > size for box in regions for side, size in zip(box, shape, strict=True)):
        return f"{', '.join(map(_text, regions))} reach beyond it"
    missing = prod(shape) - sum(prod(sizes(box)) for box in regions)
    return f"{missing} elements beside {', '.join(map(_text, regions))} have no place" if missing else None


def _text(box: Box) -> str:
    return f"[{', '.join(f'{side.start}:{side.stop}' for side in box)}]"
