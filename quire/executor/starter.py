"""Who starts the ranks of an engine, on whichever hosts, and knows how they end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from socket import socket

from quire.config import EngineConfig
from quire.executor.gate import Gate
from quire.executor.host_share import config_of_rank, num_sharing
from quire.executor.rank_placement import places_of_ranks
from quire.executor.rank_processes import PROGRAM, RankProcesses

LOOPBACK = "127.0.0.1"


class Starter(ABC):
    """Of so many ranks. Nothing is begun before `start`."""

    def __init__(self, config: EngineConfig, size: int) -> None:
        self.config, self.size = config, size

    @abstractmethod
    def start(self) -> list[socket]:
        """Have all ranks run; returns a connection to each, and they end when it is closed.

        Raises:
            StartupError: they cannot; `close` leaves nothing behind.
        """

    @abstractmethod
    def meet_by_network(self) -> bool:
        """Whether ranks find each other at a port, and not in a directory of theirs."""

    @abstractmethod
    def num_beside(self) -> Sequence[int]:
        """For each rank, how many there are on its host that take of the same memory."""

    @abstractmethod
    def why_gone(self, rank: int) -> str:
        """What is to be said of one that has closed its connection."""

    def stopped(self) -> dict[int, str]:
        """What is to be said of those that somebody has stopped, as far as that can be seen from here."""
        return {}

    def have_met(self) -> None:
        """All ranks know each other and have read what they are to do."""
        return None

    @abstractmethod
    def close(self) -> None:
        """See to it that all ranks end, whose connections are closed; twice is fine."""


class HostStarter(Starter):
    """Processes of a program for Python on this host, and those that other hosts bring."""

    def __init__(self, config: EngineConfig, size: int, program: Sequence[str] = PROGRAM) -> None:
        self._num_here = size // config.parallel.nnodes
        super().__init__(config_of_rank(config, self._num_here), size)
        self._program = program
        self._gate: Gate | None = None
        self.processes: RankProcesses | None = None

    def start(self) -> list[socket]:
        """Those that no other host has brought; which has come to its address for all."""
        parallel = self.config.parallel
        guests: dict[int, socket] = {}
        if self.meet_by_network():
            self._gate = Gate.of_hosts(parallel)
            guests = self._gate.let_in()
        address = next((guest.getsockname()[0] for guest in guests.values()), LOOPBACK)
        own = [rank for rank in range(self.size) if rank not in guests]
        places = places_of_ranks(self.config, own)
        here = self.processes = RankProcesses(self.config, self._program, places)
        return [guests.get(rank) or here.start(rank, address) for rank in range(self.size)]

    def meet_by_network(self) -> bool:
        return self.config.parallel.nnodes > 1

    def num_beside(self) -> Sequence[int]:
        return [num_sharing(self.config, self._num_here)] * self.size

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank of this host."""
        return {} if self.processes is None else self.processes.pids

    def stopped(self) -> dict[int, str]:
        return {} if self.processes is None else self.processes.stopped()

    def why_gone(self, rank: int) -> str:
        if self.processes is not None and rank in self.pids:
            return self.processes.why_gone(rank)
        return "its host has ended it, or is gone itself"

    def have_met(self) -> None:
        if self.processes is not None:
            self.processes.have_met()

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()
        if self._gate is not None:
            self._gate.close()
