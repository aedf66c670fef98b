"""The executor whose ranks Ray places, on one host or several: `mp` in all but who starts them."""

from __future__ import annotations

import importlib.util
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire import private_directories
from quire.config import EngineConfig
from quire.errors import ConfigError, StartupError
from quire.executor.gate import Gate
from quire.executor.messages import Failed
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.rank_processes import DEATH_S, startup_errors
from quire.executor.ray_messages import Come, FromRay, Lost, Placed, Wanted
from quire.executor.starter import Starter
from quire.executor.wire import Wire
from quire.processes import why_silent

PLACE_S = 60.0
"""A cluster that has no room may be about to have some."""
START_S = 120.0
"""On a busy machine Ray takes half a minute."""
CLOSE_TIMEOUT_S = 20.0
"""A Ray of our own has a dozen processes to end."""
LOOK_S = 0.02


class RayStarter(Starter):
    """Has a process of its own for Ray, which ends all that it has started when its socket is closed.

    Raises:
        ConfigError: Ray is not installed.
    """

    def __init__(self, config: EngineConfig, size: int) -> None:
        super().__init__(config, size)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "--distributed-executor-backend ray needs Ray, which is not installed: pip install 'quire[ray]'"
            )
        self._decoder = msgspec.msgpack.Decoder(FromRay)
        self._directory = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Wire | None = None
        self._gate: Gate | None = None
        self._hosts: list[str] = []
        self._ends: dict[int, str] = {}

    def start(self) -> list[socket.socket]:
        with startup_errors():
            self._directory = str(private_directories.make("ray-"))
            ours, theirs = socket.socketpair()
        wire = self._wire = Wire(ours)
        with theirs, startup_errors():
            command = [sys.executable, "-m", "quire.executor.ray_cluster", str(theirs.fileno())]
            # Apart from signals that a terminal gives to all processes of its own.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        wanted = Wanted(self.config.encoded(), self._directory, PLACE_S)
        wire.post(msgspec.msgpack.encode(wanted))
        placed = self._placed(wire)
        self._hosts, key = placed.hosts, secrets.token_hex(16)
        ranks = dict.fromkeys(range(self.size), 0)
        gate = self._gate = Gate(self.config.parallel, (placed.address, 0), ranks, key)
        wire.post(msgspec.msgpack.encode(Come(placed.address, gate.port, key)))
        guests = gate.let_in(look=self._look)
        return [guests[rank] for rank in range(self.size)]

    def _placed(self, wire: Wire) -> Placed:
        """What comes first."""
        try:
            if not select.select([wire], [], [], PLACE_S + START_S)[0]:
                raise StartupError(f"Ray has not started within {START_S:g} s")
            placed = self._heard(wire.recv())
        except EOFError as error:
            raise StartupError("Ray's process has ended; it says why above") from error
        assert isinstance(placed, Placed)
        return placed

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
        if self._wire is not None:
            self._wire.close()
        if self._process is not None and self._process.returncode is None:
            until = time.monotonic() + CLOSE_TIMEOUT_S
            while why_silent(self._process.pid) is None and time.monotonic() < until:
                time.sleep(LOOK_S)
            # Some of Ray's processes do not see that it was killed. As long as it is not waited for, the group is its.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._gate is not None:
            self._gate.close()
        if self._directory:
            private_directories.remove(Path(self._directory))

    def _look(self) -> None:
        """Raises StartupError: an actor has ended before its rank could join."""
        self._listen(0.0)
        for rank, said in self._ends.items():
            raise StartupError(f"rank {rank} cannot be started by Ray: {said}")

    def _listen(self, seconds: float) -> bool:
        """Whether more may be said; what is said in this time is noted."""
        assert self._wire is not None
        if not select.select([self._wire], [], [], seconds)[0]:
            return True
        try:
            for frame in self._wire.frames():
                self._heard(frame)
        except EOFError:
            missing = set(range(self.size)) - self._ends.keys()
            self._ends |= dict.fromkeys(sorted(missing), "Ray's process has ended")
            return False
        return True

    def _heard(self, frame: bytes) -> FromRay:
        message: FromRay = self._decoder.decode(frame)
        if isinstance(message, Failed):
            raise message.error(0)
        if isinstance(message, Lost):
            self._ends[message.rank] = message.said
        return message


class RayExecutor(MultiprocExecutor):
    """Ranks by way of Ray: of the cluster that RAY_ADDRESS names, or of one that starts and ends with the engine."""

    starter_type = RayStarter
