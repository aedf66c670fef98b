"""The process that knows Ray, as who has started it sees it."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire import private_directories
from quire.config import EngineConfig
from quire.errors import ConfigError, StartupError
from quire.executor.messages import Failed
from quire.executor.ray_messages import Bring, Come, FromRay, Lost, Placed, Wanted
from quire.executor.wire import Wire
from quire.processes import start_python, why_silent
from quire.version import install_command

ADDRESS = "RAY_ADDRESS"
"""The variable by which all of Ray's tools know the cluster to join."""
PLACE_S = 60.0
"""A cluster that has no room may be about to have some."""
START_S = 120.0
"""On a busy machine Ray takes half a minute."""
CLOSE_TIMEOUT_S = 20.0
"""A Ray of our own has a dozen processes to end."""
LOOK_S = 0.02


def check_installed(option: str) -> None:
    """Raises ConfigError: what the option asks for is not there."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{option} needs Ray, which is not installed: {install_command('ray')}")


class RayProcess:
    """Ends all that it has started when its socket is closed.

    Args:
        module: what it runs; see `ray_cluster.run`.

    Attributes:
        directory: a private one, which goes with it.

    Raises:
        OSError: the machine refuses a process, a socket or a directory.
    """

    def __init__(self, module: str, config: EngineConfig) -> None:
        self._decoder = msgspec.msgpack.Decoder(FromRay)
        self.directory = str(private_directories.make("ray-"))
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours)
        with theirs:
            program = ["-m", module, str(theirs.fileno())]
            try:
                # Apart from signals that a terminal gives to all processes of its own.
                self._process = start_python(program, pass_fds=[theirs.fileno()], start_new_session=True)
            except OSError:
                self._wire.close()
                private_directories.remove(Path(self.directory))
                raise
        self.tell(Wanted(config.encoded(), self.directory, PLACE_S))

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Wanted | Come | Bring) -> None:
        """Wait for nothing. Raises OSError: it has ended."""
        self._wire.post(msgspec.msgpack.encode(message))

    def placed(self) -> Placed:
        """What it says first.

        Raises:
            StartupError: there is no Ray, or no room; says why.
        """
        try:
            if not select.select([self._wire], [], [], PLACE_S + START_S)[0]:
                raise StartupError(f"Ray has not started within {START_S:g} s")
            placed = self._heard(self._wire.recv())
        except EOFError as error:
            raise StartupError("Ray's process has ended; it says why above") from error
        assert isinstance(placed, Placed)
        return placed

    def losses(self, seconds: float) -> Iterator[Lost]:
        """What it says from then on, within this time.

        Raises:
            EOFError: it has ended. QuireError: it has failed; says why.
        """
        if not select.select([self._wire], [], [], seconds)[0]:
            return
        for frame in self._wire.frames():
            lost = self._heard(frame)
            assert isinstance(lost, Lost)
            yield lost

    def close(self) -> None:
        """End it with all that it has started; twice is fine."""
        self._wire.close()
        if self._process.returncode is None:
            until = time.monotonic() + CLOSE_TIMEOUT_S
            while why_silent(self._process.pid) is None and time.monotonic() < until:
                time.sleep(LOOK_S)
            # Some of Ray's processes do not see that it was killed. As long as it is not waited for, the group is its.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        private_directories.remove(Path(self.directory))

    def _heard(self, frame: bytes) -> FromRay:
        message: FromRay = self._decoder.decode(frame)
        if isinstance(message, Failed):
            raise message.error(0)
        return message
