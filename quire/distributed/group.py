# SPDX-License-Identifier: Apache-2.0
"""Group of ranks that compute one model together, as seen by one of them.

Invariant: all ranks of a group make the same calls in the same order. A lost rank fails the pending call on every
other rank, which names it; after that the group is unusable. `HostGroups` reduces in the tree of `ops.all_reduce`: a
host's ranks are a power of two and so a whole subtree, and sums are bitwise equal to those of any other group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import groupby

import torch
from torch import Tensor

from quire.errors import EngineError, RankLostError, StartupError

# Ranks do the same work at the same time, so a rank that delays the others for so long has stopped.
COLLECTIVE_TIMEOUT_S = 30.0


class Group(ABC):
    """Movement of tensors between ranks; reductions are computed by ops.

    Every call raises RankLostError if a rank it waits for is gone, or does not answer in time. Errors use the ranks'
    `names`, their numbers in a larger group.
    """

    def __init__(self, rank: int, size: int, names: Sequence[int] | None = None) -> None:
        self.rank = rank
        self.size = size
        self.names = range(size) if names is None else names

    @abstractmethod
    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return each rank's tensor, of the same shape and dtype, in rank order; x itself is this rank's."""

    @abstractmethod
    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send part i to rank i; returns what each rank sends to this one.

        Parts are equal except for their first dimension, which may be 0.
        """

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to another rank's `recv` without waiting; x may change afterwards."""

    @abstractmethod
    def recv(self, out: Tensor, source: int) -> None:
        """Receive a tensor of this shape and dtype into contiguous `out`."""

    def close(self, reason: str = "it has ended") -> None:
        """Leave the group; waiting ranks get the reason if possible. May be called twice."""
        return None

    def why_not_captured(self) -> str | None:
        """Return why communication cannot be part of a CUDA graph or a recorded kernel graph; None if it can."""
        return "communication between ranks uses system calls"

    def check_all_alive(self) -> None:
        """Raise RankLostError if a rank was lost, which makes the device's later results invalid."""
        return None

    def lost_error(self, ranks: Iterable[int], said: str) -> RankLostError:
        """Return the error for a loss among these ranks."""
        return RankLostError([self.names[rank] for rank in ranks], said)

    def check_peer(self, rank: int) -> None:
        """Raise EngineError if it is none of the other ranks."""
        if rank == self.rank or not 0 <= rank < self.size:
            raise EngineError(f"rank {self.rank} of {self.size} has no peer {rank}")


class SingleRankGroup(Group):
    """Group of a single rank."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def send(self, x: Tensor, to: int) -> None:
        self.check_peer(to)

    def recv(self, out: Tensor, source: int) -> None:
        self.check_peer(source)


ALONE = SingleRankGroup()


_WORD_BYTES = 64


def check_same(group: Group, facts: Mapping[str, bytes]) -> None:
    """Check that every rank has the same facts; all ranks use the same names.

    Raises:
        StartupError: a fact differs; names it, and the ranks that differ from rank 0.
    """
    for name, ranks in zip(facts, different_ranks(group, list(facts.values())), strict=True):
        if ranks:
            others = ", ".join(map(str, ranks))
            raise StartupError(
                f"all ranks must have the same {name}, but rank 0's differs from that of {others}"
            )


def check_same_word(group: Group, name: str, word: str, advice: str) -> None:
    """Check that every rank has the same short word.

    Raises:
        StartupError: the ranks differ; has every word, and the advice.
    """
    own = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
    said = word.encode()[:_WORD_BYTES]
    own[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    words = [bytes(found.tolist()).rstrip(b"\0").decode(errors="replace") for found in group.all_gather(own)]
    if len({*words}) > 1:
        ranks_of = {one: [rank for rank, other in enumerate(words) if other == one] for one in words}
        who = ", ".join(f"{one} on ranks {', '.join(map(str, ranks))}" for one, ranks in ranks_of.items())
        raise StartupError(f"all ranks must have the same {name}: {who}; {advice}")


def different_ranks(group: Group, facts: list[bytes]) -> list[list[int]]:
    """Return, for each fact, the ranks whose value differs from rank 0's."""
    own = torch.frombuffer(bytearray(b"".join(sha256(fact).digest() for fact in facts)), dtype=torch.uint8)
    first, *others = (found.view(len(facts), -1) for found in group.all_gather(own))
    return [
        [rank for rank, other in enumerate(others, 1) if not torch.equal(other[index], first[index])]
        for index in range(len(facts))
    ]


class HostGroups(Group):
    """Ranks of several hosts, equally many on each: they share memory within a host, and data crosses hosts once.

    Operations without a path of their own (`quire.kernels.cpu.collectives`) use `world`.

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
    """Return the number of ranks per host; None if they are not divided as `HostGroups` requires."""
    sizes = [len([*ranks]) for _, ranks in groupby(hosts)]
    (size, *others), num = sizes, len(sizes)
    is_even = all(other == size for other in others) and len(set(hosts)) == num
    return size if num > 1 and is_even and size > 1 and size & (size - 1) == 0 else None
