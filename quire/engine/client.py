# SPDX-License-Identifier: Apache-2.0
"""Clients of engine cores: in this process, in a child process, or in another process of the server.

Invariant of `CoreClient`: `send` never blocks; `receive` blocks and is called from one thread at a time; after `close`
neither is called. A core that cannot start or dies surfaces as an exception from `receive`, and from each later one.

The process that starts a core also ends it; a child that hangs is killed.

`RemoteClient` uses ZeroMQ on a private directory of Unix sockets. Senders connect, receivers bind, so messages to a
front end that is slow or gone block neither the core nor another front end. `send` and `receive` use a socket each, so
that two threads may use them. Malformed frames are logged and dropped.

`HeldInterrupts`: a plan that was made is executed and its result applied, or the engine is not used again; otherwise
scheduler and worker would disagree on rows and blocks.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import zmq

from quire import private_directories
from quire.config import EngineConfig
from quire.engine.core_progress import LoadingState, ProgressFile
from quire.engine.core_start import openmp_spin_count, start_core
from quire.engine.messages import (
    NO_MESSAGE,
    WIRE_VERSION,
    CoreFailed,
    CoreMessage,
    CoreReady,
    CoreRequest,
    Shutdown,
)
from quire.engine.supervision import supervision
from quire.errors import EngineDeadError, StartupError
from quire.processes import exit_reason

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)


class CoreClient(ABC):
    """Connection to one engine core."""

    @property
    def stalls(self) -> bool:
        """True if the core seems to hang, as detected by `receive`."""
        return False

    @property
    def loading(self) -> LoadingState | None:
        """Stage of a core that loads, if known."""
        return None

    def in_work(self, request_ids: Iterable[str]) -> set[str]:
        """Return the requests among these that the core is working on, or was when it died, if known."""
        return set()

    @abstractmethod
    def send(self, message: CoreRequest) -> None:
        """Queue a message for the core."""

    @abstractmethod
    def receive(self) -> list[CoreMessage]:
        """Wait for the core's next messages; the first ever is `CoreReady`. Empty when the client was closed.

        Raises:
            StartupError: the core could not start.
            EngineDeadError: the core died.
        """

    @abstractmethod
    def close(self) -> None:
        """End the core and release everything; may be called twice."""


class HeldInterrupts:
    """Context that defers a KeyboardInterrupt to its end; a second one is raised at once.

    No effect in other threads than the main one, inside another such context, and if the program handles SIGINT itself.
    """

    _is_active = False  # main thread only, so one per process

    def __init__(self) -> None:
        self._came = False
        self._holds = False

    def __enter__(self) -> None:
        if HeldInterrupts._is_active or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._holds = HeldInterrupts._is_active = True
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            HeldInterrupts._is_active = False
            if self._came and failure is None:
                raise KeyboardInterrupt

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True


POLL_MS = 200
RECONNECT_MS = 10
REQUESTS = "requests"  # Socket that the core binds in the directory.
PROGRESS = "progress"
CONFIG = "config"


def message_socket(front_end: int) -> str:
    """Return the name of the socket that a front end binds in the directory."""
    return f"out.{front_end}"  # no longer than REQUESTS: what TMPDIR may have is short enough


@dataclass(frozen=True)
class CoreAddress:
    """Private directory and process id of a core."""

    directory: str
    pid: int


class RemoteClient(CoreClient):
    """Core client over sockets, with a progress file written by the core.

    Raises:
        StartupError: TMPDIR is too long for sockets. Any failure here leaves nothing behind.
    """

    def __init__(self, config: EngineConfig, directory: Path, front_end: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock, self._receive_lock = threading.Lock(), threading.Lock()
        self._ready = False
        self._closed = threading.Event()
        self._heartbeat = supervision().make_hang_detector(config.supervision.core_heartbeat_timeout)
        self._failure: CoreFailed | None = None
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        # Garbage is collected in any order, and a context destroyed before its sockets would wait for them.
        self._close_sockets = weakref.finalize(self, _close, self._sockets, self._context)
        self._close_sockets.atexit = False  # the receiver thread may be using one
        self._directory = directory
        try:
            self._outbox = self._socket(zmq.PUSH, REQUESTS)
            self._inbox = self._socket(zmq.PULL, message_socket(front_end))
            self._progress = self._open_progress(config)
            # Last, so that no failure leaves a process behind.
            self._pid = self._connect_core(config)
        except BaseException:
            self._release()
            raise

    @abstractmethod
    def _open_progress(self, config: EngineConfig) -> ProgressFile:
        """Open the progress file or its equivalent."""

    @abstractmethod
    def _connect_core(self, config: EngineConfig) -> int:
        """Start or attach to the core; returns its process id."""

    @abstractmethod
    def _is_gone(self) -> bool:
        """Return whether the core has ended, so that no further messages will be sent."""

    @abstractmethod
    def _why_gone(self) -> str:
        """Return the reason for the operator; called once the core is gone."""

    @abstractmethod
    def _on_hang(self, silent_s: float) -> None:
        """Handle a core without progress for `silent_s` seconds."""

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
                # Checked before polling, so that the last messages are read before the death is reported.
                is_gone = self._is_gone()
                if self._inbox.poll(0 if is_gone else POLL_MS):
                    message = self._decoded(self._inbox.recv())
                    if message is not None:
                        return [self._accept(message)]
                elif is_gone:
                    raise self._death()
                else:
                    self._check_heartbeat()
            return []

    @property
    def stalls(self) -> bool:
        return self._heartbeat.stalls

    def in_work(self, request_ids: Iterable[str]) -> set[str]:
        """Return the requests among these that the core is working on, or was when it died; none after `close`."""
        return set() if self._closed.is_set() else self._progress.in_work(request_ids)

    @property
    def loading(self) -> LoadingState | None:
        return None if self._closed.is_set() else self._progress.loading

    def digests_in_work(self) -> set[bytes]:
        """Return the digests of the requests being worked on (see `core_progress.requests_with_digests`)."""
        return set() if self._closed.is_set() else self._progress.digests()

    def _decoded(self, frame: bytes) -> CoreMessage | None:
        """Decode a frame; None if it is malformed, which only a process of this user can have sent."""
        try:
            message: CoreMessage = self._decoder.decode(frame)
            return message
        except NO_MESSAGE as error:
            logger.error("a frame of %d bytes is not a message of a core: %s", len(frame), error)
            return None

    def _accept(self, message: CoreMessage) -> CoreMessage:
        if isinstance(message, CoreFailed):
            self._failure = message
            raise self._death()
        if isinstance(message, CoreReady):
            check_version(message)
            self._ready = True
        return message

    def _check_heartbeat(self) -> None:
        if self._heartbeat.poll(self._progress, self._pid):
            self._on_hang(self._heartbeat.silent_s)

    def _death(self) -> StartupError | EngineDeadError:
        """Return the reason of the core's end; a core that reported its failure is not waited for."""
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
    """Raise StartupError if the path is too long for a socket."""
    length, limit = len(os.fsencode(path)), zmq.IPC_PATH_MAX_LEN
    if length > limit:
        raise StartupError(
            f"TMPDIR is too long: a socket's path may have {limit} bytes, and {path} has {length}; "
            "set TMPDIR to a shorter directory"
        )


def check_version(ready: CoreReady) -> None:
    """Check that both ends use the same version; they differ if an installation changed under a running program.

    Raises:
        StartupError: they do not; names both versions.
    """
    if ready.wire_version != WIRE_VERSION:
        raise StartupError(
            f"the engine core uses message version {ready.wire_version} and this process version {WIRE_VERSION}: "
            "is quire installed twice, or was it changed while this program ran?"
        )


CLOSE_TIMEOUT_S = 5.0


class InProcessClient(CoreClient):
    """Client that runs the core in the thread that calls `receive`: no spawn, easy to debug.

    A KeyboardInterrupt out of `receive` loses no message: sent messages have been handled, and the core's answers are
    returned by the next `receive`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._core: EngineCore | None = None
        self._inbox: deque[CoreRequest] = deque()
        self._sent = threading.Event()
        self._answers: list[CoreMessage] = []
        self._in_use = threading.RLock()
        self._closed = False

    def send(self, message: CoreRequest) -> None:
        self._inbox.append(message)
        self._sent.set()

    def receive(self) -> list[CoreMessage]:
        with self._in_use:
            if self._core is None:
                self._core = self._start()
                self._answers.append(self._core.ready)
            while not self._answers and not self._closed:
                if not self._core.has_work():
                    self._sent.wait(self._core.patience_s)
                with HeldInterrupts():
                    self._turn(self._core)
            answers, self._answers = self._answers, []
            return answers

    def _start(self) -> EngineCore:
        from quire.engine.core import EngineCore

        with openmp_spin_count():
            return EngineCore(self._config)

    def _turn(self, core: EngineCore) -> None:
        """Handle all sent messages, then take a step if there is work."""
        self._sent.clear()
        while self._inbox and not self._closed:
            message = self._inbox.popleft()
            if isinstance(message, Shutdown):
                self._closed = True
            elif (answer := core.handle(message)) is not None:
                self._answers.append(answer)
        if core.has_work() and not self._closed:
            self._answers.append(core.step())
            self._answers += core.pop_answers()

    def close(self) -> None:
        self.send(Shutdown())
        with self._in_use:  # another thread's `receive` ends first
            if self._core is not None:
                self._core.shutdown()


class ProcessClient(RemoteClient):
    """Client that runs the core in a child process, over ZeroMQ on a private directory of Unix sockets.

    The child is started by its module name with the configuration as a msgpack file, so nothing is pickled and no
    `__main__` guard is needed.

    Raises:
        StartupError: TMPDIR is too long for sockets, or the machine refuses a process, a socket or room for a file.
            Nothing is left behind.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, config: EngineConfig) -> None:
        with startup_errors():
            super().__init__(config, private_directories.make(), front_end=0)

    def kill(self) -> None:
        """Kill the core; its receiver gets an EngineDeadError."""
        self.process.kill()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self.send(Shutdown())
        self._closed.set()
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._release()

    def _open_progress(self, config: EngineConfig) -> ProgressFile:
        return ProgressFile.create(self._directory / PROGRESS, config.scheduler.max_num_seqs)

    def _connect_core(self, config: EngineConfig) -> int:
        self.process = self._start_core(config)
        return self.process.pid

    def _start_core(self, config: EngineConfig) -> subprocess.Popen[bytes]:
        (self._directory / CONFIG).write_bytes(config.encoded())
        return start_core(config, self._directory)

    def _is_gone(self) -> bool:
        return self.process.poll() is not None

    def _why_gone(self) -> str:
        return exit_reason(self.process.wait())

    def _on_hang(self, silent_s: float) -> None:
        logger.error("the engine core made no progress for %.0f s; it is killed", silent_s)
        self.process.kill()
        self.process.wait()

    def _release(self) -> None:
        super()._release()
        private_directories.remove(self._directory)


@contextmanager
def startup_errors() -> Iterator[None]:
    """Convert OS and ZeroMQ errors into a StartupError for the operator."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        raise StartupError(
            f"the engine core cannot be started: {error}; check TMPDIR, its free space and ulimit -a"
        ) from error


def make_client(config: EngineConfig, *, in_process: bool) -> CoreClient:
    """Return a client for one of the two transports."""
    return InProcessClient(config) if in_process else ProcessClient(config)


def make_clients(configs: Sequence[EngineConfig], *, in_process: bool) -> list[CoreClient]:
    """Return a client for each configuration; if one fails, all are closed."""
    clients: list[CoreClient] = []
    with closed_on_error(clients):
        clients.extend(make_client(config, in_process=in_process) for config in configs)
    return clients


@contextmanager
def closed_on_error(clients: Sequence[CoreClient]) -> Iterator[None]:
    """Close the clients if the construction of their owner fails."""
    try:
        yield
    except BaseException:
        for client in clients:
            client.close()
        raise
