"""What crosses ranks of several hosts: what kernels do within a host, and what gloo does across."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.distributed.hosts import Hosts
from quire.kernels import ops
from quire.kernels.reference_collectives import tree_sum

FEW = 1 << 12
"""Elements that are not worth being shared out among the ranks of a host: each takes all of them across."""


def all_reduce(x: Tensor, group: Hosts) -> Tensor:
    """A host's ranks add theirs up, each takes its part of that across, and they put the sums together."""
    own = ops.all_reduce(x, group.here)
    if own.numel() <= FEW:
        return tree_sum(group.across.all_gather(own))
    size, count = group.here.size, own.numel()
    part = -(-count // size)
    parts = pad(own.flatten(), (0, size * part - count)).view(size, part)
    total = tree_sum(group.across.all_gather(parts[group.here.rank]))
    return ops.all_gather(total, group.here, 0)[:count].view(own.shape)


def all_gather(x: Tensor, group: Hosts, dim: int) -> Tensor:
    """Each rank gets those of its place on all hosts, and a host's ranks put them together."""
    across = torch.stack(group.across.all_gather(x))
    every = ops.all_gather(across[None].contiguous(), group.here, 0)  # by place, and then by host
    return torch.cat(every.transpose(0, 1).flatten(0, 1).unbind(0), dim)
