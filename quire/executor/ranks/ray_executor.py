# SPDX-License-Identifier: Apache-2.0
"""Executor whose ranks are placed by Ray; like `mp` except for the starter."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.executor.ranks.gate import RankAcceptor
from quire.executor.ranks.multiproc import MultiprocExecutor
from quire.executor.ranks.rank_processes import DEATH_S, RankStarter, startup_errors
from quire.executor.ranks.ray_cluster import RayProcess, StartRanks, check_installed


class RayStarter(RankStarter):
    """Starter with a Ray driver process.

    Raises:
        ConfigError: Ray is not installed.
    """

    def __init__(self, config: EngineConfig, size: int) -> None:
        super().__init__(config, size)
        check_installed("--distributed-executor-backend ray")
        self._process: RayProcess | None = None
        self._gate: RankAcceptor | None = None
        self._hosts: list[str] = []
        self._ends: dict[int, str] = {}

    def start(self) -> list[socket.socket]:
        with startup_errors():
            process = self._process = RayProcess("quire.executor.ranks.ray_ranks", self.config)
        placed = process.placed()
        self._hosts, key = placed.hosts, secrets.token_hex(16)
        ranks = dict.fromkeys(range(self.size), 0)
        gate = self._gate = RankAcceptor(self.config.parallel, (placed.address, 0), ranks, key)
        process.send(StartRanks(placed.address, gate.port, key))
        connections = gate.accept_ranks(look=self._check_actors)
        return [connections[rank] for rank in range(self.size)]

    def meets_by_network(self) -> bool:
        return True

    def num_sharing_memory(self) -> Sequence[int]:
        return [self._hosts.count(host) for host in self._hosts]

    def why_gone(self, rank: int) -> str:
        """Return Ray's reason, which may arrive a moment later."""
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

    def _check_actors(self) -> None:
        """Raise StartupError if an actor has ended before its rank could join."""
        self._listen(0.0)
        for rank, said in self._ends.items():
            raise StartupError(f"rank {rank} cannot be started by Ray: {said}")

    def _listen(self, seconds: float) -> bool:
        """Record the losses reported within `seconds`; False once the driver has ended."""
        assert self._process is not None
        try:
            self._ends |= {lost.number: lost.said for lost in self._process.losses(seconds)}
        except EOFError:
            missing = set(range(self.size)) - self._ends.keys()
            self._ends |= dict.fromkeys(sorted(missing), "Ray's process has ended")
            return False
        return True


class RayExecutor(MultiprocExecutor):
    """Executor with ranks in the cluster that RAY_ADDRESS names, or in one that starts and ends with the engine."""

    starter_type = RayStarter
