# SPDX-License-Identifier: Apache-2.0
"""Collectives through shared memory, as functions on tensors, with all checks; between hosts through gloo."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.distributed.group import HostGroups
from quire.distributed.shared_memory import SharedMemory
from quire.kernels import ops
from quire.kernels.cpu.calls import call, check_on_cpu, describe, dtype_code, empty
from quire.kernels.reference_collectives import tree_sum

FEW = 1 << 12
"""Element count up to which each rank reduces all elements across hosts instead of a part."""


def all_reduce(x: Tensor, group: SharedMemory | HostGroups) -> Tensor:
    if isinstance(group, HostGroups):
        return _reduce_over_hosts(x, group)
    code = dtype_code("all_reduce", "x", x)
    x = x.contiguous()
    out = empty(x, *x.shape)
    _cross("all_reduce", (out, x), group, x.numel(), code)
    return out


def all_gather(x: Tensor, group: SharedMemory | HostGroups, dim: int = -1) -> Tensor:
    if isinstance(group, HostGroups):
        return _gather_over_hosts(x, group, dim)
    dtype_code("all_gather", "x", x)
    shape = list(x.shape)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"all_gather: x has no dimension {dim}; it is {describe(x)}")
    dim %= len(shape)
    x = x.contiguous()
    out = empty(x, *shape[:dim], group.size * shape[dim], *shape[dim + 1 :])
    rows = math.prod(shape[:dim])
    _cross("all_gather", (out, x), group, rows, x.nbytes // rows if rows else 0)
    return out


def all_to_all(x: Tensor, counts: Sequence[int], group: SharedMemory) -> tuple[Tensor, list[int]]:
    check_on_cpu("all_to_all", "x", x)
    if not x.dim() or len(counts) != group.size or sum(counts) != len(x) or min(counts) < 0:
        raise ValueError(f"all_to_all: {list(counts)} rows are for {group.size} ranks, of {describe(x)}")
    x, given = x.contiguous(), torch.tensor(counts)
    table = torch.empty(group.size, group.size, dtype=torch.int64)
    _cross("all_gather", (table, given), group, 1, given.nbytes)
    came: list[int] = table[:, group.rank].tolist()
    out = empty(x, sum(came), *x.shape[1:], dtype=x.dtype)
    row_bytes = math.prod(x.shape[1:]) * x.itemsize
    lost = call("all_to_all", (out, x, group.memory, table), group.rank, row_bytes)
    if lost:
        raise group.loss(lost - 1)
    return out, came


def _cross(name: str, tensors: tuple[Tensor, Tensor], group: SharedMemory, *numbers: int) -> None:
    """Run a collective kernel.

    Raises:
        RankLostError: another rank does not respond.
    """
    lost = call(name, (*tensors, group.memory), group.rank, *numbers)
    if lost:
        raise group.loss(lost - 1)


def _reduce_over_hosts(x: Tensor, group: HostGroups) -> Tensor:
    """Sum within the host, reduce a part per rank across hosts, and gather the parts within the host."""
    own = ops.all_reduce(x, group.here)
    if own.numel() <= FEW:
        return tree_sum(group.across.all_gather(own))
    size, count = group.here.size, own.numel()
    part = -(-count // size)
    parts = pad(own.flatten(), (0, size * part - count)).view(size, part)
    total = tree_sum(group.across.all_gather(parts[group.here.rank]))
    return ops.all_gather(total, group.here, 0)[:count].view(own.shape)


def _gather_over_hosts(x: Tensor, group: HostGroups, dim: int) -> Tensor:
    """Gather across hosts the ranks of this rank's index, then within the host."""
    across = torch.stack(group.across.all_gather(x))
    every = ops.all_gather(across[None].contiguous(), group.here, 0)  # by index in the host, and then by host
    return torch.cat(every.transpose(0, 1).flatten(0, 1).unbind(0), dim)
