"""`RemoteClient`: an engine core in another process, over ZeroMQ on a private directory of Unix sockets.

Invariant: the front end binds the socket on which it is told things and the core connects to it, so that what the core
says to a front end that is slow, or gone, waits for nobody and holds up no other. The core binds the one on which it is
asked. `send` and `receive` use a socket each, so that two threads may use them. A frame that is no message costs a line
in the log.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from quire.config import EngineConfig
from quire.engine.core_client import CoreClient
from quire.engine.messages import (
    NO_MESSAGE,
    WIRE_VERSION,
    CoreFailed,
    CoreMessage,
    CoreReady,
    CoreRequest,
)
from quire.engine.progress import Heartbeat, Progress, cpu_seconds_with_children
from quire.errors import EngineDeadError, StartupError

logger = logging.getLogger(__name__)

POLL_MS = 200
RECONNECT_MS = 10
REQUESTS = "requests"
"""The socket that a core binds in the directory."""
PROGRESS = "progress"
CONFIG = "config"


def messages_of(front_end: int) -> str:
    """The socket that a front end binds in the directory."""
    return f"told.{front_end}"


@dataclass(frozen=True)
class CoreAddress:
    """Where a core is to be found: its private directory, and its process."""

    directory: str
    pid: int


class RemoteClient(CoreClient):
    """The sockets, and the file in which the core writes how far it is.

    Raises:
        StartupError: TMPDIR is too long for sockets. Nothing is left behind, as by whatever else fails here.
    """

    def __init__(self, config: EngineConfig, directory: Path, front_end: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock, self._receive_lock = threading.Lock(), threading.Lock()
        self._ready = False
        self._closed = threading.Event()
        self._heartbeat = Heartbeat(config.supervision.core_heartbeat_timeout)
        self._failure: CoreFailed | None = None
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        # One that is dropped is collected in any order: a context that goes before its sockets would wait for them.
        self._close_sockets = weakref.finalize(self, _close, self._sockets, self._context)
        self._close_sockets.atexit = False  # its thread may be in one of them
        self._directory = directory
        try:
            self._outbox = self._socket(zmq.PUSH, REQUESTS)
            self._inbox = self._socket(zmq.PULL, messages_of(front_end))
            self._progress = self._open_progress(config)
            # Last, so that whatever fails has left no process.
            self._pid = self._reach_core(config)
        except BaseException:
            self._release()
            raise

    @abstractmethod
    def _open_progress(self, config: EngineConfig) -> Progress:
        """The file, or what stands for it."""

    @abstractmethod
    def _reach_core(self, config: EngineConfig) -> int:
        """See to it that there is a core that knows of this front end; its process id."""

    @abstractmethod
    def _is_gone(self) -> bool:
        """Whether the core has ended, so that no more will come than has been sent."""

    @abstractmethod
    def _why_gone(self) -> str:
        """For the operator; asked once it is."""

    @abstractmethod
    def _on_hang(self, silent_s: float) -> None:
        """The core has not gone on for so long."""

    @property
    def address(self) -> CoreAddress:
        return CoreAddress(str(self._directory), self._pid)

    def send(self, message: CoreRequest) -> None:
        with self._send_lock:
            if not self._closed.is_set():
                self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> list[CoreMessage]:
        with self._receive_lock:
            while not self._closed.is_set():
                # Asked before polling, so that what a dying core still sent is read before its death is reported.
                is_gone = self._is_gone()
                if self._inbox.poll(0 if is_gone else POLL_MS):
                    message = self._decoded(self._inbox.recv())
                    if message is not None:
                        return [self._accept(message)]
                elif is_gone:
                    raise self._death()
                else:
                    self._look()
            return []

    @property
    def stalls(self) -> bool:
        return self._heartbeat.stalls

    def in_work(self, request_ids: Iterable[str]) -> set[str]:
        """Those of these requests on which the core works, or worked when it died; none once it was closed."""
        return set() if self._closed.is_set() else self._progress.in_work(request_ids)

    def digests_in_work(self) -> set[bytes]:
        """The same for whoever knows the requests (`progress.named_in`)."""
        return set() if self._closed.is_set() else self._progress.digests()

    def _decoded(self, frame: bytes) -> CoreMessage | None:
        """What a frame is; None if it is no message of ours, which only somebody with our user id can have sent."""
        try:
            message: CoreMessage = self._decoder.decode(frame)
            return message
        except NO_MESSAGE as error:
            logger.error("a frame of %d bytes is no message of a core: %s", len(frame), error)
            return None

    def _accept(self, message: CoreMessage) -> CoreMessage:
        if isinstance(message, CoreFailed):
            self._failure = message
            raise self._death()
        if isinstance(message, CoreReady):
            check_version(message)
            self._ready = True
        return message

    def _look(self) -> None:
        turns, used = self._progress.num_turns, cpu_seconds_with_children(self._pid)
        if self._heartbeat.hangs(time.monotonic(), turns, used, self._progress.expected_s):
            self._on_hang(self._heartbeat.silent_s)

    def _death(self) -> StartupError | EngineDeadError:
        """Why the core is no more; one that has said that it failed is not waited for."""
        if self._failure is not None:
            message = self._failure.message
        else:
            how = "ended" if self._ready else "ended while starting"
            message = f"the engine core {how}: {self._why_gone()}"
        return EngineDeadError(message) if self._ready else StartupError(message)

    def _socket(self, kind: int, name: str) -> zmq.Socket[bytes]:
        path = self._directory / name
        check_length(path)
        # A connecting socket queues messages until its peer is there, and after it is gone.
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(0)
        socket.linger = 0
        socket.reconnect_ivl = RECONNECT_MS
        reach = socket.connect if kind == zmq.PUSH else socket.bind
        reach(f"ipc://{path}")
        return socket

    def _release(self) -> None:
        with self._send_lock, self._receive_lock:
            self._close_sockets()


def _close(sockets: Iterable[zmq.Socket[bytes]], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    for socket in sockets:
        socket.close()
    context.term()


def check_length(path: Path) -> None:
    """Raises StartupError: no socket can have this path."""
    length, limit = len(os.fsencode(path)), zmq.IPC_PATH_MAX_LEN
    if length > limit:
        raise StartupError(
            f"TMPDIR is too long: a socket's path may have {limit} bytes, and {path} has {length}; "
            "set TMPDIR to a shorter directory"
        )


def check_version(ready: CoreReady) -> None:
    """Both ends must speak the same version; they may not where an installation was changed under a running program.

    Raises:
        StartupError: they do not; says which they speak.
    """
    if ready.wire_version != WIRE_VERSION:
        raise StartupError(
            f"the engine core speaks version {ready.wire_version} of the messages and this process {WIRE_VERSION}: "
            "is quire installed twice, or was it changed while this program ran?"
        )
