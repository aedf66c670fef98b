"""The ranks of one host, as child processes: started, watched and ended.

Invariant: each has a socket, by which it is told what to do, and a pipe from whoever started it, and ends when either
is closed; so no rank outlives one of them. The private directory is gone once all ranks have met.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from quire import private_directories
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.executor.rank_placement import Processors, on
from quire.processes import STOPPED, exit_reason, start_python, why_silent

PROGRAM = ("-m", "quire.executor.rank_process")
CONFIG = "config"
"""The file of the private directory that has the configuration."""
CLOSE_TIMEOUT_S = 5.0
DEATH_S = 1.0
"""How long a rank that others have lost may take to be seen as dead."""


class RankProcesses:
    """Processes of a program for Python.

    Args:
        places: the processors that each rank keeps to; one that is not there runs anywhere.

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
        """Each rank's process."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def start(self, rank: int, address: str) -> socket.socket:
        """Start one, and return the other end of its socket; `address` is its host's, as all ranks reach it."""
        with startup_errors():
            ours, theirs = socket.socketpair()
        self.hand_over(rank, address, theirs)
        return ours

    def hand_over(self, rank: int, address: str, end: socket.socket) -> None:
        """Start one with this end of its socket, which it keeps alone."""
        told = [str(self._directory), str(rank), address, str(end.fileno())]
        with end, startup_errors(), on(self._places.get(rank, ())):
            self._processes[rank] = start_python(
                [*self._program, *told], stdin=subprocess.PIPE, pass_fds=[end.fileno()]
            )

    def have_met(self) -> None:
        """All ranks know each other and have read what they are to do."""
        private_directories.remove(self._directory)

    def stopped(self) -> dict[int, str]:
        """What is to be said of those that somebody has stopped."""
        return {
            rank: f"process {pid} {STOPPED}" for rank, pid in self.pids.items() if why_silent(pid) == STOPPED
        }

    def ended(self) -> dict[int, int]:
        """The exit codes of those that have ended."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def why_gone(self, rank: int) -> str:
        """What is to be said of one that has closed its socket."""
        process = self._processes[rank]
        try:
            how = exit_reason(process.wait(DEATH_S))
        except subprocess.TimeoutExpired:
            how = "it has closed its socket"
        return f"process {process.pid}: {how}"

    def close(self) -> None:
        """End all that are not gone; twice is fine."""
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
        self.have_met()


@contextmanager
def startup_errors() -> Iterator[None]:
    """What the machine refuses is a StartupError."""
    try:
        yield
    except OSError as error:
        raise StartupError(
            f"a rank cannot be started: {error}; look at TMPDIR, at the room there and at ulimit -a"
        ) from error
