"""The executor whose ranks Ray places, on one host or several: `mp` in all but who starts them."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.executor.gate import Gate
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.rank_processes import DEATH_S, startup_errors
from quire.executor.ray_messages import Come
from quire.executor.ray_process import RayProcess, check_installed
from quire.executor.starter import Starter


class RayStarter(Starter):
    """Has a process of its own for Ray.

    Raises:
        ConfigError: Ray is not installed.
    """

    def __init__(self, config: EngineConfig, size: int) -> None:
        super().__init__(config, size)
        check_installed("--distributed-executor-backend ray")
        self._process: RayProcess | None = None
        self._gate: Gate | None = None
        self._hosts: list[str] = []
        self._ends: dict[int, str] = {}

    def start(self) -> list[socket.socket]:
        with startup_errors():
            process = self._process = RayProcess("quire.executor.ray_ranks", self.config)
        placed = process.placed()
        self._hosts, key = placed.hosts, secrets.token_hex(16)
        ranks = dict.fromkeys(range(self.size), 0)
        gate = self._gate = Gate(self.config.parallel, (placed.address, 0), ranks, key)
        process.tell(Come(placed.address, gate.port, key))
        guests = gate.let_in(look=self._look)
        return [guests[rank] for rank in range(self.size)]

    def meet_by_network(self) -> bool:
        return True

    def num_beside(self) -> Sequence[int]:
        return [self._hosts.count(host) for host in self._hosts]

    def why_gone(self, rank: int) -> str:
        """What Ray says, which it may do a moment later."""
        until = time.monotonic() + DEATH_S
        while rank not in self._ends and (left := until - time.monotonic()) > 0:
            if not self._listen(left):
                break
        return self._ends.get(rank, "its actor has ended, or its host is gone")

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        if self._gate is not None:
            self._gate.close()

    def _look(self) -> None:
        """Raises StartupError: an actor has ended before its rank could join."""
        self._listen(0.0)
        for rank, said in self._ends.items():
            raise StartupError(f"rank {rank} cannot be started by Ray: {said}")

    def _listen(self, seconds: float) -> bool:
        """Whether more may be said; what is said in this time is noted."""
        assert self._process is not None
        try:
            self._ends |= {lost.number: lost.said for lost in self._process.losses(seconds)}
        except EOFError:
            missing = set(range(self.size)) - self._ends.keys()
            self._ends |= dict.fromkeys(sorted(missing), "Ray's process has ended")
            return False
        return True


class RayExecutor(MultiprocExecutor):
    """Ranks by way of Ray: of the cluster that RAY_ADDRESS names, or of one that starts and ends with the engine."""

    starter_type = RayStarter
