"""The engine core as a process of its own: `python -m quire.engine.core_process DIRECTORY`.

Invariant: single-threaded apart from kernels; reads `config.json` and two ipc sockets in the private directory it
is given, tells its parent how it ended, and never outlives it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import CoreFailed, CoreMessage, CoreRequest, Shutdown
from quire.errors import StartupError
from quire.logging_setup import configure_logging

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 1000
LINGER_MS = 1000


class CoreProcess:
    """Drains the request socket, steps the core while it has work, sends what comes out."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self._inbox = self._bind(zmq.PULL, directory / "requests")
        self._outbox = self._bind(zmq.PUSH, directory / "messages")
        self._decoder = msgspec.msgpack.Decoder(CoreRequest)
        self._encoder = msgspec.msgpack.Encoder()
        self._parent = os.getppid()
        self._directory = directory
        self._config = msgspec.json.decode((directory / "config.json").read_bytes(), type=EngineConfig)

    def run(self) -> int:
        """Load, serve until told to stop; returns the exit code."""
        try:
            core = EngineCore(self._config)
        except StartupError as error:
            self._send(CoreFailed(str(error)))
            return 1
        self._send(core.ready)
        try:
            while self._handle_messages(core):
                if core.has_work():
                    self._send(core.step())
        finally:
            core.shutdown()
        if self._is_orphan():
            shutil.rmtree(self._directory, ignore_errors=True)
        return 0

    def _handle_messages(self, core: EngineCore) -> bool:
        """Handle all waiting messages, waiting for one if idle; False when it is time to end."""
        while self._inbox.poll(0 if core.has_work() else IDLE_POLL_MS):
            message = self._decoder.decode(self._inbox.recv())
            if isinstance(message, Shutdown):
                return False
            answer = core.handle(message)
            if answer is not None:
                self._send(answer)
        return not self._is_orphan()

    def _is_orphan(self) -> bool:
        return os.getppid() != self._parent

    def _send(self, message: CoreMessage) -> None:
        self._outbox.send(self._encoder.encode(message))

    def report_crash(self) -> None:
        """Tell the parent that a bug of ours ends the core; the traceback is in the log."""
        self._send(CoreFailed("the engine core failed; see its log for the traceback"))

    def _bind(self, kind: int, path: Path) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = LINGER_MS
        socket.bind(f"ipc://{path}")
        return socket


def main() -> int:
    configure_logging()
    # Ctrl-C reaches the whole process group; the parent decides when the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = CoreProcess(Path(sys.argv[1]))
    try:
        return process.run()
    except Exception:  # the last boundary of the process: log, tell the parent, end with an error code
        logger.exception("the engine core failed")
        process.report_crash()
        return 1


if __name__ == "__main__":
    sys.exit(main())
