# SPDX-License-Identifier: Apache-2.0
"""Ranks of several hosts, equally many on each: they share memory within a host, and data crosses hosts once.

Invariant: ranks are reduced in the tree of `ops.all_reduce`. A host's ranks are a power of two and so a whole subtree;
sums are bitwise equal to those of any other group.

Kernels: `quire.kernels.cpu.host_collectives`. L is the number of ranks per host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby

from torch import Tensor

from quire.distributed.group import Group


class HostGroups(Group):
    """All ranks as seen by one of them; operations without a specialized path use `world`.

    Attributes:
        here: the ranks of this host.
        across: the ranks with this rank's index on each host.
    """

    def __init__(self, world: Group, here: Group, across: Group) -> None:
        super().__init__(world.rank, world.size, world.names)
        assert here.size * across.size == world.size, "hosts have equally many ranks"
        assert here.size & (here.size - 1) == 0, "a host's ranks are a subtree"
        self._world, self.here, self.across = world, here, across

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._world.all_gather(x)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return self._world.all_to_all(parts)

    def send(self, x: Tensor, to: int) -> None:
        self._world.send(x, to)

    def recv(self, out: Tensor, source: int) -> None:
        self._world.recv(out, source)

    def close(self, reason: str = "it has ended") -> None:
        for group in (self.here, self.across, self._world):
            group.close(reason)

    def why_not_captured(self) -> str | None:
        return self._world.why_not_captured()


def ranks_per_host(hosts: Sequence[Hashable]) -> int | None:
    """Return L for ranks on these hosts; None if they are not divided as `HostGroups` requires."""
    sizes = [len([*ranks]) for _, ranks in groupby(hosts)]
    (size, *others), num = sizes, len(sizes)
    is_even = all(other == size for other in others) and len(set(hosts)) == num
    return size if num > 1 and is_even and size > 1 and size & (size - 1) == 0 else None
