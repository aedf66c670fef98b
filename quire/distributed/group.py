# SPDX-License-Identifier: Apache-2.0
"""Group of ranks that compute one model together, as seen by one of them.

Invariant: all ranks of a group make the same calls in the same order. A lost rank fails the pending call on every
other rank, which names it; after that the group is unusable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor

from quire.errors import EngineError, RankLostError

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

    def check_nobody_lost(self) -> None:
        """Raise RankLostError if a rank was lost, which makes the device's later results invalid."""
        return None

    def lost_error(self, ranks: Iterable[int], said: str) -> RankLostError:
        """Return the error for a loss among these ranks."""
        return RankLostError([self.names[rank] for rank in ranks], said)

    def check_peer(self, rank: int) -> None:
        """Raise EngineError if it is none of the other ranks."""
        if rank == self.rank or not 0 <= rank < self.size:
            raise EngineError(f"rank {self.rank} of {self.size} has no peer {rank}")


class Alone(Group):
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


ALONE = Alone()
