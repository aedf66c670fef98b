"""`Group`: the ranks that compute one model together, as one of them sees it.

Invariant: all ranks of a group make the same calls in the same order. A rank that is lost fails the call that waits for
it, on every other rank, with its name; after that a group is of no more use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor

from quire.errors import EngineError, RankLostError

ANSWER_S = 30.0
"""All ranks do the same work at the same time, so one that keeps the others waiting for so long has stopped."""


class Group(ABC):
    """Moves tensors between ranks, and computes nothing: what is made of them is the affair of ops.

    Every call raises RankLostError where a rank it waits for is gone, or does not answer in time. It calls ranks by
    `names`, their numbers if they are some of more.
    """

    def __init__(self, rank: int, size: int, names: Sequence[int] | None = None) -> None:
        self.rank = rank
        self.size = size
        self.names = range(size) if names is None else names

    @abstractmethod
    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Each rank's tensor, of the same shape and dtype, in the order of ranks; x itself is this rank's."""

    @abstractmethod
    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Give part i to rank i; returns what each rank gives this one.

        Parts are equal but for their first sizes, which may be 0.
        """

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None:
        """Give a tensor to another rank, which takes it by `recv`, and wait for nobody; x may change afterwards."""

    @abstractmethod
    def recv(self, out: Tensor, source: int) -> None:
        """Write what another rank sends, of this shape and dtype, into a contiguous tensor."""

    def close(self, reason: str = "it has ended") -> None:
        """Leave; the others are told why if they wait for this rank, and the ways allow it. Twice is fine."""
        return None

    def why_not_captured(self) -> str | None:
        """Why what crosses ranks cannot be part of a graph or a tape: a phrase for people; None if it can."""
        return "what crosses ranks goes by way of the system"

    def check_nobody_lost(self) -> None:
        """Raises RankLostError: one was, and a device that went on without it has computed nothing of use."""
        return None

    def loss_of(self, ranks: Iterable[int], said: str) -> RankLostError:
        """That one of these is lost."""
        return RankLostError([self.names[rank] for rank in ranks], said)

    def check_peer(self, rank: int) -> None:
        """Raises EngineError: it is none of the other ranks."""
        if rank == self.rank or not 0 <= rank < self.size:
            raise EngineError(f"rank {self.rank} of {self.size} has no peer {rank}")


class Alone(Group):
    """The only rank: nothing moves."""

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
