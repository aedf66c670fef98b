# SPDX-License-Identifier: Apache-2.0
"""Collectives across hosts: shared memory within a host, gloo between hosts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.distributed.hosts import HostGroups
from quire.kernels import ops
from quire.kernels.reference_collectives import tree_sum

FEW = 1 << 12
"""Element count up to which each rank reduces all elements across hosts instead of a part."""


def all_reduce(x: Tensor, group: HostGroups) -> Tensor:
    """Sum within the host, reduce a part per rank across hosts, and gather the parts within the host."""
    own = ops.all_reduce(x, group.here)
    if own.numel() <= FEW:
        return tree_sum(group.across.all_gather(own))
    size, count = group.here.size, own.numel()
    part = -(-count // size)
    parts = pad(own.flatten(), (0, size * part - count)).view(size, part)
    total = tree_sum(group.across.all_gather(parts[group.here.rank]))
    return ops.all_gather(total, group.here, 0)[:count].view(own.shape)


def all_gather(x: Tensor, group: HostGroups, dim: int) -> Tensor:
    """Gather across hosts the ranks of this rank's index, then within the host."""
    across = torch.stack(group.across.all_gather(x))
    every = ops.all_gather(across[None].contiguous(), group.here, 0)  # by index in the host, and then by host
    return torch.cat(every.transpose(0, 1).flatten(0, 1).unbind(0), dim)
