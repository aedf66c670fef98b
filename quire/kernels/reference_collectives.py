# SPDX-License-Identifier: Apache-2.0
"""Oracles of collectives between the ranks that compute a model together.

All ranks of a group call the same ones in the same order; a lost rank is a RankLostError on the others. In a group of
one, they do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.distributed.group import Group


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add neighbors, then the sums of neighbors, and so on; an odd one out moves up to the next level.

    So the tree over 2n parts contains that over each half, if n is a power of two.
    """
    level = list(parts)
    while len(level) > 1:
        sums = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        level = sums + level[2 * len(sums) :]
    return level[0]


def all_reduce(x: Tensor, /, group: Group) -> Tensor:
    """Return the sum of all ranks' x, of any shape and float dtype, with the same bits on every rank.

    Ranks are added in pairs of neighbors, then the sums of pairs, and so on.
    """
    return tree_sum(group.all_gather(x))


def all_gather(x: Tensor, /, group: Group, dim: int = -1) -> Tensor:
    """Return all ranks' x, of one shape, concatenated along `dim` in rank order."""
    return torch.cat(group.all_gather(x), dim)


def all_to_all(x: Tensor, counts: Sequence[int], /, group: Group) -> tuple[Tensor, list[int]]:
    """Send the first counts[0] rows of x [T, ...] to rank 0, the next counts[1] to rank 1 ...

    Returns the received rows, in the order of their source ranks, and how many came from each.
    """
    parts = group.all_to_all(torch.split(x, list(counts)))
    return torch.cat(parts), [len(part) for part in parts]


def send(x: Tensor, /, group: Group, to: int) -> None:
    """Send x to another rank, which calls `recv`; x may change afterwards."""
    group.send(x, to)


def recv(out: Tensor, /, group: Group, source: int) -> None:
    """Receive into `out`, contiguous, from a rank that sends the same shape and dtype."""
    group.recv(out, source)
