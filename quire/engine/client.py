"""How a front end reaches its engine core: one interface, two transports.

Invariant: `send` never blocks; `receive` blocks and is called from one thread at a time; after `close` neither is
called. A core that cannot start or dies surfaces as an exception from `receive`, and from each `receive` after it; one
that hangs is killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from quire.config import EngineConfig
from quire.engine.interrupts import HeldInterrupts
from quire.engine.messages import (
    WIRE_VERSION,
    CoreFailed,
    CoreMessage,
    CoreReady,
    CoreRequest,
    Shutdown,
)
from quire.engine.progress import Heartbeat, Progress, cpu_seconds
from quire.errors import EngineDeadError, StartupError

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)

POLL_MS = 200
RECONNECT_MS = 10
CLOSE_TIMEOUT_S = 5.0
SPIN_COUNT = 1000
"""How often a thread of the core looks for more work before it sleeps: some 20 microseconds, which bridges two
kernels. OpenMP's own milliseconds keep a core from everybody else for nothing (docs/performance.md)."""


class CoreClient(ABC):
    """A connection to one engine core."""

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
        """End the core and release everything; calling it twice is fine."""


class InProcessClient(CoreClient):
    """Runs the core in the thread that calls `receive`: no spawn, easy to debug.

    A KeyboardInterrupt out of `receive` loses no message: what was sent is acted on, and what the core said meanwhile
    is handed out by the next `receive`.
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

        with settled_spinning():
            return EngineCore(self._config)

    def _turn(self, core: EngineCore) -> None:
        """Act on what was sent, then take a step if there is work."""
        self._sent.clear()
        while self._inbox and not self._closed:
            message = self._inbox.popleft()
            if isinstance(message, Shutdown):
                self._closed = True
            elif (answer := core.handle(message)) is not None:
                self._answers.append(answer)
        if core.has_work() and not self._closed:
            self._answers.append(core.step())

    def close(self) -> None:
        self.send(Shutdown())
        with self._in_use:  # another thread's `receive` ends first
            if self._core is not None:
                self._core.shutdown()


class ProcessClient(CoreClient):
    """Runs the core in a child process, over ZeroMQ on a private directory of Unix sockets.

    The child is started by its module name with the configuration as a JSON file, so nothing is pickled and no
    `__main__` guard is needed. `send` and `receive` use a socket each, so that two threads may use them.

    Raises:
        StartupError: TMPDIR is too long for sockets, or the machine refuses a process, a socket or room for a file.
            Nothing is left behind.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock, self._receive_lock = threading.Lock(), threading.Lock()
        self._ready = False
        self._closed = threading.Event()
        self._heartbeat = Heartbeat(config.supervision.core_heartbeat_timeout)
        self._failure: CoreFailed | None = None
        self._context = zmq.Context()
        with startup_errors():
            self._directory = Path(tempfile.mkdtemp(prefix="quire-"))
            try:
                self._outbox = self._connect(zmq.PUSH, "requests")
                self._inbox = self._connect(zmq.PULL, "messages")
                self._progress = Progress.create(self._directory / "progress", config.scheduler.max_num_seqs)
                # Last, so that whatever fails has left no process.
                self.process = self._start_core(config)
            except BaseException:
                self._release()
                raise

    def send(self, message: CoreRequest) -> None:
        with self._send_lock:
            if not self._closed.is_set():
                self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> list[CoreMessage]:
        with self._receive_lock:
            while not self._closed.is_set():
                # Asked before polling, so that what a dying core still sent is read before its death is reported.
                exited = self.process.poll() is not None
                if self._inbox.poll(0 if exited else POLL_MS):
                    return [self._accept(self._decoder.decode(self._inbox.recv()))]
                if exited:
                    raise self._death()
                self._kill_if_it_hangs()
            return []

    @property
    def stalls(self) -> bool:
        """Whether the core seems to hang; `receive` finds out."""
        return self._heartbeat.stalls

    def in_work(self, request_ids: Iterable[str]) -> set[str]:
        """Those of these requests on which the core works, or worked when it died; none once it was closed."""
        return set() if self._closed.is_set() else self._progress.in_work(request_ids)

    def _accept(self, message: CoreMessage) -> CoreMessage:
        if isinstance(message, CoreFailed):
            self._failure = message
            raise self._death()
        if isinstance(message, CoreReady):
            check_version(message)
            self._ready = True
        return message

    def _kill_if_it_hangs(self) -> None:
        turns, used = self._progress.num_turns, cpu_seconds(self.process.pid)
        if self._heartbeat.hangs(time.monotonic(), turns, used):
            logger.error("the engine core has not gone on for %.0f s; it is killed", self._heartbeat.silent_s)
            self.process.kill()
            self.process.wait()

    def _death(self) -> StartupError | EngineDeadError:
        """Why the core is no more; one that has said that it failed is not waited for."""
        if self._failure is not None:
            message = self._failure.message
        else:
            how = "ended" if self._ready else "ended while starting"
            message = f"the engine core {how}: {exit_reason(self.process.wait())}"
        return EngineDeadError(message) if self._ready else StartupError(message)

    def _start_core(self, config: EngineConfig) -> subprocess.Popen[bytes]:
        (self._directory / "config.json").write_bytes(msgspec.json.encode(config))
        program = [sys.executable, "-m", "quire.engine.core_process"]
        command = [*program, str(self._directory), str(os.getpid())]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=core_environment(os.environ))

    def _connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        path = self._directory / name
        length, limit = len(os.fsencode(path)), zmq.IPC_PATH_MAX_LEN
        if length > limit:
            raise StartupError(
                f"TMPDIR is too long: a socket's path may have {limit} bytes, and {path} has {length}; "
                "set TMPDIR to a shorter directory"
            )
        # The core binds: a connecting socket queues messages until its peer is there, and after it is gone.
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.reconnect_ivl = RECONNECT_MS
        socket.connect(f"ipc://{path}")
        return socket

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

    def _release(self) -> None:
        with self._send_lock, self._receive_lock:
            self._context.destroy()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def startup_errors() -> Iterator[None]:
    """What the machine refuses is a sentence for the operator."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        raise StartupError(
            f"the engine core cannot be started: {error}; look at TMPDIR, at the room there and at ulimit -a"
        ) from error


def exit_reason(code: int) -> str:
    """How a process ended, by the code that `Popen` gives."""
    return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"


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


def core_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A core's environment: its threads spin for SPIN_COUNT rounds, unless the user has said how they wait."""
    if environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        return dict(environment)
    return {**environment, "GOMP_SPINCOUNT": str(SPIN_COUNT)}


@contextmanager
def settled_spinning() -> Iterator[None]:
    """A core's environment while OpenMP is loaded, which reads it then; what is the user's stays as it was.

    Without effect if the user's program has loaded OpenMP before, and so settled it.
    """
    added = core_environment(os.environ).items() - os.environ.items()
    os.environ.update(added)
    try:
        yield
    finally:
        for name, _ in added:
            os.environ.pop(name, None)


def make_client(config: EngineConfig, *, in_process: bool) -> CoreClient:
    """The client for one of the two transports."""
    return InProcessClient(config) if in_process else ProcessClient(config)


def make_clients(config: EngineConfig, num_cores: int, *, in_process: bool) -> list[CoreClient]:
    """Clients for so many cores; if one cannot be made, there are none."""
    clients: list[CoreClient] = []
    with closed_on_error(clients):
        clients.extend(make_client(config, in_process=in_process) for _ in range(num_cores))
    return clients


@contextmanager
def closed_on_error(clients: Sequence[CoreClient]) -> Iterator[None]:
    """While their owner is being made, whatever fails ends the cores."""
    try:
        yield
    except BaseException:
        for client in clients:
            client.close()
        raise
