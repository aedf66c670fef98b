# SPDX-License-Identifier: Apache-2.0
"""Rank processes of one host, and the interface for starting an engine's ranks.

Invariant: each rank has a socket for its messages and a pipe from its parent, and ends when either is closed; so no
rank outlives them. The private directory is removed once all ranks have met.
"""

from __future__ import annotations

import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from quire import private_directories
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.executor.rank_placement import (
    Processors,
    affinity,
    num_ranks_sharing_memory,
    rank_config,
    rank_processors,
)
from quire.executor.ranks.gate import RankAcceptor
from quire.processes import STOPPED, exit_reason, start_python, why_silent

PROGRAM = ("-m", "quire.executor.ranks.rank_process")
CONFIG = "config"  # Configuration file in the private directory.
CLOSE_TIMEOUT_S = 5.0
DEATH_S = 1.0  # Time until a rank that others have lost is seen as dead.


class RankProcesses:
    """Rank processes running a Python program.

    Args:
        places: processors per rank; other ranks run anywhere.

    Raises:
        StartupError: the machine refuses a process, or room for a file.
    """

    def __init__(
        self,
        config: EngineConfig,
        program: Sequence[str] = PROGRAM,
        places: Mapping[int, Processors] | None = None,
    ) -> None:
        self._program, self._places = program, places or {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        with startup_errors():
            self._directory = private_directories.make("ranks-")
            (self._directory / CONFIG).write_bytes(config.encoded())

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def start(self, rank: int, address: str) -> socket.socket:
        """Start a rank and return our end of its socket; `address` is its host's, as all ranks reach it."""
        with startup_errors():
            ours, theirs = socket.socketpair()
        self.hand_over(rank, address, theirs)
        return ours

    def hand_over(self, rank: int, address: str, end: socket.socket) -> None:
        """Start a rank with this end of its socket, which it then owns."""
        arguments = [str(self._directory), str(rank), address, str(end.fileno())]
        with end, startup_errors(), affinity(self._places.get(rank, ())):
            self._processes[rank] = start_python(
                [*self._program, *arguments], stdin=subprocess.PIPE, pass_fds=[end.fileno()]
            )

    def release_directory(self) -> None:
        """Remove the private directory, once all ranks have met and read their configuration."""
        private_directories.remove(self._directory)

    def stopped(self) -> dict[int, str]:
        """Return rank -> description, for ranks stopped by a signal."""
        return {
            rank: f"process {pid} {STOPPED}" for rank, pid in self.pids.items() if why_silent(pid) == STOPPED
        }

    def ended(self) -> dict[int, int]:
        """Return rank -> exit code, for ranks that have ended."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def why_gone(self, rank: int) -> str:
        """Return why a rank has closed its socket."""
        process = self._processes[rank]
        try:
            how = exit_reason(process.wait(DEATH_S))
        except subprocess.TimeoutExpired:
            how = "it has closed its socket"
        return f"process {process.pid}: {how}"

    def close(self) -> None:
        """Stop all ranks; may be called twice."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            if why_silent(process.pid) is not None:
                process.kill()
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.release_directory()


@contextmanager
def startup_errors() -> Iterator[None]:
    """Convert OS errors into a StartupError."""
    try:
        yield
    except OSError as error:
        raise StartupError(
            f"a rank cannot be started: {error}; check TMPDIR, its free space and ulimit -a"
        ) from error


LOOPBACK = "127.0.0.1"


class RankStarter(ABC):
    """Starter of an engine's ranks; nothing is started before `start`."""

    def __init__(self, config: EngineConfig, size: int) -> None:
        self.config, self.size = config, size

    @abstractmethod
    def start(self) -> list[socket.socket]:
        """Start all ranks; returns a connection to each, whose closing ends it.

        Raises:
            StartupError: they cannot be started; `close` leaves nothing behind.
        """

    @abstractmethod
    def meets_by_network(self) -> bool:
        """Return whether ranks meet at a network store rather than in a directory."""

    @abstractmethod
    def num_sharing_memory(self) -> Sequence[int]:
        """Return, for each rank, how many ranks of its host share its memory."""

    @abstractmethod
    def why_gone(self, rank: int) -> str:
        """Return why a rank has closed its connection."""

    def stopped(self) -> dict[int, str]:
        """Return rank -> description, for ranks seen to be stopped by a signal."""
        return {}

    def release_directory(self) -> None:
        """Notice that all ranks have met and read their configuration."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop all ranks, whose connections are closed; may be called twice."""


class HostStarter(RankStarter):
    """Ranks as processes on this host, and those that other hosts bring."""

    def __init__(self, config: EngineConfig, size: int, program: Sequence[str] = PROGRAM) -> None:
        self._num_here = size // config.parallel.nnodes
        super().__init__(rank_config(config, self._num_here), size)
        self._program = program
        self._gate: RankAcceptor | None = None
        self.processes: RankProcesses | None = None

    def start(self) -> list[socket.socket]:
        """Start this host's ranks, after the other hosts' have joined; their connections give this host's address."""
        parallel = self.config.parallel
        remote: dict[int, socket.socket] = {}
        if self.meets_by_network():
            self._gate = RankAcceptor.of_hosts(parallel)
            remote = self._gate.accept_ranks()
        address = next((connection.getsockname()[0] for connection in remote.values()), LOOPBACK)
        own = [rank for rank in range(self.size) if rank not in remote]
        places = rank_processors(self.config, own)
        here = self.processes = RankProcesses(self.config, self._program, places)
        return [remote.get(rank) or here.start(rank, address) for rank in range(self.size)]

    def meets_by_network(self) -> bool:
        return self.config.parallel.nnodes > 1

    def num_sharing_memory(self) -> Sequence[int]:
        return [num_ranks_sharing_memory(self.config, self._num_here)] * self.size

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id, for this host."""
        return {} if self.processes is None else self.processes.pids

    def stopped(self) -> dict[int, str]:
        return {} if self.processes is None else self.processes.stopped()

    def why_gone(self, rank: int) -> str:
        if self.processes is not None and rank in self.pids:
            return self.processes.why_gone(rank)
        return "its host has ended it, or is gone itself"

    def release_directory(self) -> None:
        if self.processes is not None:
            self.processes.release_directory()

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()
        if self._gate is not None:
            self._gate.close()
