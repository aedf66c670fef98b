"""The cores that a front end starts itself: in its own process, or in a child's.

Invariant: what starts a core ends it. One in a child process that hangs is killed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import zmq

from quire import private_directories
from quire.config import EngineConfig
from quire.engine.core_client import CoreClient
from quire.engine.interrupts import HeldInterrupts
from quire.engine.messages import CoreMessage, CoreRequest, Shutdown
from quire.engine.progress import Progress
from quire.engine.remote import CONFIG, PROGRESS, RemoteClient
from quire.errors import StartupError
from quire.processes import exit_reason, start_python

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
SPIN_COUNT = 1000
"""How often a thread of torch's looks for more work before it sleeps: some 20 microseconds. OpenMP's own milliseconds
keep a core from everybody else for nothing, and from the threads of the kernels (docs/performance.md)."""


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
            self._answers += core.take_answers()

    def close(self) -> None:
        self.send(Shutdown())
        with self._in_use:  # another thread's `receive` ends first
            if self._core is not None:
                self._core.shutdown()


class ProcessClient(RemoteClient):
    """Runs the core in a child process, over ZeroMQ on a private directory of Unix sockets.

    The child is started by its module name with the configuration as a file of msgpack, so nothing is pickled and no
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
        """End the core at once; whoever receives hears of it."""
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

    def _open_progress(self, config: EngineConfig) -> Progress:
        return Progress.create(self._directory / PROGRESS, config.scheduler.max_num_seqs)

    def _reach_core(self, config: EngineConfig) -> int:
        self.process = self._start_core(config)
        return self.process.pid

    def _start_core(self, config: EngineConfig) -> subprocess.Popen[bytes]:
        (self._directory / CONFIG).write_bytes(config.encoded())
        executor = config.parallel.distributed_executor_backend
        program = ["-m", "quire.engine.core_process", str(self._directory), str(os.getpid()), executor]
        return start_python(program, core_environment(os.environ), stdin=subprocess.DEVNULL)

    def _is_gone(self) -> bool:
        return self.process.poll() is not None

    def _why_gone(self) -> str:
        return exit_reason(self.process.wait())

    def _on_hang(self, silent_s: float) -> None:
        logger.error("the engine core has not gone on for %.0f s; it is killed", silent_s)
        self.process.kill()
        self.process.wait()

    def _release(self) -> None:
        super()._release()
        private_directories.remove(self._directory)


@contextmanager
def startup_errors() -> Iterator[None]:
    """What the machine refuses is a sentence for the operator."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        raise StartupError(
            f"the engine core cannot be started: {error}; look at TMPDIR, at the room there and at ulimit -a"
        ) from error


def core_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A core's environment: torch's threads spin for SPIN_COUNT rounds, unless the user has said how they wait."""
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


def make_clients(configs: Sequence[EngineConfig], *, in_process: bool) -> list[CoreClient]:
    """A client for the core of each configuration; if one cannot be made, there are none."""
    clients: list[CoreClient] = []
    with closed_on_error(clients):
        clients.extend(make_client(config, in_process=in_process) for config in configs)
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
