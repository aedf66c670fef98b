"""Torch oracle of the ops that cross ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.distributed.group import Group


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Neighbours are added, then the sums of neighbours, and so on; one without a neighbour waits for the next round.

    So the tree over 2n parts holds that over each half, if n is a power of two.
    """
    level = list(parts)
    while len(level) > 1:
        sums = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        level = sums + level[2 * len(sums) :]
    return level[0]


def all_reduce(x: Tensor, group: Group) -> Tensor:
    return tree_sum(group.all_gather(x))


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    return torch.cat(group.all_gather(x), dim)


def all_to_all(x: Tensor, counts: Sequence[int], group: Group) -> tuple[Tensor, list[int]]:
    parts = group.all_to_all(torch.split(x, list(counts)))
    return torch.cat(parts), [len(part) for part in parts]
