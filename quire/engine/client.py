"""How a front end reaches its engine core: one interface, two transports.

Invariant: `send` never blocks; `receive` blocks and is called from one thread at a time; after `close` neither is
called. A core that cannot start or dies surfaces as an exception from `receive`, exactly once.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from quire.config import EngineConfig
from quire.engine.interrupts import held_interrupts
from quire.engine.messages import CoreFailed, CoreMessage, CoreRequest, Shutdown
from quire.errors import EngineDeadError, StartupError

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

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
    """Runs the core in the thread that calls `receive`: no spawn, easy to debug."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._core: EngineCore | None = None
        self._inbox: queue.SimpleQueue[CoreRequest] = queue.SimpleQueue()
        self._in_use = threading.RLock()
        self._closed = False

    def send(self, message: CoreRequest) -> None:
        self._inbox.put(message)

    def receive(self) -> list[CoreMessage]:
        with self._in_use:
            return self._run_until_news()

    def _run_until_news(self) -> list[CoreMessage]:
        if self._core is None:
            # Heeded only if nothing has loaded OpenMP yet; after that the user's program has settled it.
            os.environ.update(core_environment(os.environ))
            from quire.engine.core import EngineCore

            self._core = EngineCore(self._config)
            return [self._core.ready]
        answers: list[CoreMessage] = []
        while not self._closed:
            answers += self._drain_inbox(self._core.has_work() or bool(answers))
            if self._core.has_work() and not self._closed:
                with held_interrupts():
                    answers.append(self._core.step())
            if answers:
                break
        return answers

    def _drain_inbox(self, busy: bool) -> list[CoreMessage]:
        assert self._core is not None
        answers: list[CoreMessage] = []
        while not self._inbox.empty() or not busy:
            message = self._inbox.get()
            if isinstance(message, Shutdown):
                self._closed = True
                break
            answer = self._core.handle(message)
            if answer is not None:
                answers.append(answer)
            busy = True
        return answers

    def close(self) -> None:
        self._inbox.put(Shutdown())
        with self._in_use:  # another thread's `receive` ends first
            if self._core is not None:
                self._core.shutdown()


class ProcessClient(CoreClient):
    """Runs the core in a child process, over ZeroMQ on a private directory of Unix sockets.

    The child is started by its module name with the configuration as a JSON file, so nothing is pickled and no
    `__main__` guard is needed. `send` and `receive` use a socket each, so that two threads may use them.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="quire-"))
        (self._directory / "config.json").write_bytes(msgspec.json.encode(config))
        self._context = zmq.Context()
        self._outbox = self._connect(zmq.PUSH, "requests")
        self._inbox = self._connect(zmq.PULL, "messages")
        self._send_lock, self._receive_lock = threading.Lock(), threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._ready = False
        self._closed = threading.Event()
        self._failure: CoreFailed | None = None
        command = [sys.executable, "-m", "quire.engine.core_process", str(self._directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=core_environment(os.environ))

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
            return []

    def _accept(self, message: CoreMessage) -> CoreMessage:
        if isinstance(message, CoreFailed):
            self._failure = message
            raise self._death()
        self._ready = True
        return message

    def _death(self) -> StartupError | EngineDeadError:
        code = self.process.wait(CLOSE_TIMEOUT_S)
        if not self._ready:
            text = (
                self._failure.message
                if self._failure
                else f"the engine core ended with code {code} while starting"
            )
            return StartupError(text)
        return EngineDeadError("the engine core has died; all requests in flight are lost")

    def _connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        # The core binds: a connecting socket queues messages until its peer is there, and after it is gone.
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.reconnect_ivl = RECONNECT_MS
        socket.connect(f"ipc://{self._directory / name}")
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
        with self._send_lock, self._receive_lock:
            self._context.destroy()
        shutil.rmtree(self._directory, ignore_errors=True)


def core_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A core's environment: its threads spin for SPIN_COUNT rounds, unless the user has said how they wait."""
    if environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        return dict(environment)
    return {**environment, "GOMP_SPINCOUNT": str(SPIN_COUNT)}


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
