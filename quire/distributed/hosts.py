"""Ranks of several hosts, equally many neighbours on each: within a host they share memory, and what crosses hosts does
so once.

Invariant: ranks are added in the tree of `ops.all_reduce`. Those of a host are a whole subtree of it, since they are a
power of two; so sums have the bits that they would have in any other group.

How: `quire.kernels.cpu.host_collectives`. L are the ranks of each host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby

from torch import Tensor

from quire.distributed.group import Group


class Hosts(Group):
    """All ranks, as one of them sees them.

    What has no way of its own here goes that of `world`.

    Attributes:
        here: the ranks of this host.
        across: those that have this one's place on each host.
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


def size_of_hosts(hosts: Sequence[Hashable]) -> int | None:
    """L, of ranks that are on such hosts; None: they are not shared out so that `Hosts` could have them."""
    sizes = [len([*ranks]) for _, ranks in groupby(hosts)]
    (size, *others), num = sizes, len(sizes)
    is_even = all(other == size for other in others) and len(set(hosts)) == num
    return size if num > 1 and is_even and size > 1 and size & (size - 1) == 0 else None
