# SPDX-License-Identifier: Apache-2.0
"""Engine core behind sockets: messages of front ends in, outputs to each of them.

Invariant: single-threaded apart from kernels and the parent watchdog. It reads `config` and one ipc socket in its
private directory, sends each front end its own messages on that front end's socket, writes `progress`, reports to its
parent how it ended, and never outlives it. Malformed frames are logged and dropped.

`FrontEndSockets`: the first front end gets all messages that belong to no other one, statistics above all, so that
these are counted once. Prefix cache deltas go to all. Messages to a front end that is gone are lost.

`ParentProcess`: a process that watches its parent ends within PARENT_POLL_S + GRACE_S of it, as long as native code
releases the GIL. `PR_SET_PDEATHSIG` would come too early: it is sent when the *thread* that started the process ends,
and it would leave the private directory behind.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from quire import private_directories
from quire.config import EngineConfig
from quire.engine.client import CONFIG, PROGRESS, REQUESTS, message_socket
from quire.engine.core import EngineCore
from quire.engine.core_progress import ProgressFile
from quire.engine.messages import (
    NO_MESSAGE,
    AbortRequests,
    AddRequest,
    Attach,
    CoreFailed,
    CoreMessage,
    CoreRequest,
    Detach,
    EngineCoreOutputs,
    Shutdown,
    UtilityResult,
    front_end_of_number,
    front_end_of_request,
)
from quire.engine.replicas.lockstep import Lockstep, ReplicaPeers, replica_address
from quire.errors import EngineError, StartupError
from quire.logging_setup import configure_logging
from quire.processes import freeze_garbage
from quire.scheduler.output import RequestUpdate, SchedulerStats

logger = logging.getLogger(__name__)

LINGER_MS = 1000
FIRST = 0
# Interval at which the first front end gets statistics of steps that have nothing else for it.
STATS_S = 0.05


class FrontEndSockets:
    """One socket per front end; the first is open from the beginning."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        directory: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._directory = directory
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._stats_sent_at = 0.0
        self.open(FIRST)

    def open(self, front_end: int) -> None:
        """Connect to a front end, which has bound its socket already, so that no message waits."""
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.linger = LINGER_MS
        socket.connect(f"ipc://{self._directory / message_socket(front_end)}")
        self._sockets[front_end] = socket

    def close(self, front_end: int) -> None:
        """Disconnect a front end; unknown ones are ignored."""
        if front_end in self._sockets:
            self._sockets.pop(front_end).close(0)

    def send_to(self, front_end: int, message: CoreMessage) -> None:
        if front_end in self._sockets:
            with suppress(zmq.Again):
                self._sockets[front_end].send(self._encoder.encode(message), zmq.NOBLOCK)

    def send(self, message: CoreMessage) -> None:
        """Send a message to the front ends it concerns."""
        if len(self._sockets) == 1:
            self.send_to(FIRST, message)
        elif isinstance(message, EngineCoreOutputs):
            self._send_parts(message)
        else:
            self.send_to(
                front_end_of_number(message.call_id) if isinstance(message, UtilityResult) else FIRST, message
            )

    def _send_parts(self, outputs: EngineCoreOutputs) -> None:
        parts: dict[int, list[RequestUpdate]] = {}
        for update in outputs.updates:
            parts.setdefault(front_end_of_request(update.request_id), []).append(update)
        if outputs.cache is not None:  # each front end chooses among cores
            parts = {front_end: parts.get(front_end, []) for front_end in self._sockets}
        if FIRST in parts or outputs.spent or self._stats_due(outputs.stats):
            self._stats_sent_at = self._clock()
            mine = parts.pop(FIRST, [])
            self.send_to(FIRST, msgspec.structs.replace(outputs, updates=mine))
        for front_end, updates in parts.items():
            self.send_to(front_end, EngineCoreOutputs(updates, None, outputs.timestamp, cache=outputs.cache))

    def _stats_due(self, stats: SchedulerStats | None) -> bool:
        """Return whether statistics alone are worth a message: always the last ones before the core is idle."""
        if stats is None:
            return False
        return not (stats.num_running or stats.num_waiting) or self._clock() - self._stats_sent_at > STATS_S


PARENT_POLL_S = 0.5
GRACE_S = 1.5  # Time to end gracefully after the parent is lost.


class ParentProcess:
    """Parent process, identified by the pid that it passes; `getppid` alone may already be that of an orphan.

    If the parent is gone, this process removes the parent's private directory, if given.
    """

    def __init__(self, pid: int, directory: Path | None = None) -> None:
        self._pid = pid
        self._directory = directory

    def is_gone(self) -> bool:
        return os.getppid() != self._pid

    def watch(self) -> None:
        """Start a thread that ends this process if the parent ends and this process does not."""
        threading.Thread(target=self._watch, name="quire-parent", daemon=True).start()

    def clean_up(self) -> None:
        """Remove the private directory if the parent no longer can."""
        if self._directory is not None and self.is_gone():
            private_directories.remove(self._directory)

    def _watch(self) -> None:
        while not self.is_gone():
            time.sleep(PARENT_POLL_S)
        time.sleep(GRACE_S)
        self.clean_up()
        os._exit(1)


IDLE_POLL_MS = 1000
# Larger caches are not checked when idle: a new request would wait 0.2 s or more.
MAX_CHECKED_BLOCKS = 100_000


class CoreService:
    """Loop that drains the request socket, steps the core while it has work, and sends its outputs."""

    def __init__(self, directory: Path, parent: ParentProcess) -> None:
        self._parent = parent
        self._config = EngineConfig.decoded((directory / CONFIG).read_bytes())
        if self._config.share is not None and self._config.share.processors:
            os.sched_setaffinity(
                0, self._config.share.processors
            )  # before there are threads, which inherit it
        self._context = context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(f"ipc://{directory / REQUESTS}")
        self._outboxes = FrontEndSockets(context, directory)
        self._lockstep = self._join_replicas(context)
        self._gone: set[int] = set()
        self._decoder = msgspec.msgpack.Decoder(CoreRequest)
        self._progress = ProgressFile(directory / PROGRESS)
        configure_logging(self._config.observability.log_level, self._config.observability.log_format)

    def _join_replicas(self, context: zmq.Context[zmq.Socket[bytes]]) -> Lockstep | None:
        """Connect to replicas that share experts; messages about their steps arrive in the inbox."""
        parallel = self._config.parallel
        if not parallel.shares_experts:
            return None
        directory, own = Path(self._config.meeting), parallel.first_replica
        self._inbox.bind(replica_address(directory, own))
        others = [number for number in range(parallel.data_parallel_size) if number != own]
        return Lockstep(ReplicaPeers(context, directory, others).send)

    def run(self) -> int:
        """Load and serve until shutdown; returns the exit code."""
        try:
            return self._run()
        finally:
            if self._config.meeting:  # the other replicas cannot continue without this one
                private_directories.remove(Path(self._config.meeting))

    def _run(self) -> int:
        try:
            core = EngineCore(self._config, progress=self._progress, lockstep=self._lockstep)
        except StartupError as error:
            self._outboxes.send(CoreFailed(str(error)))
            return 1
        freeze_garbage()
        self._outboxes.send(core.ready)
        try:
            self._serve(core)
        except EngineError as error:
            if self._lockstep is None:
                raise
            logger.error(
                "the replica ends: %s", error
            )  # usually after another replica, whose log has the cause
            self._outboxes.send(CoreFailed(str(error)))
            return 1
        finally:
            core.shutdown()
        return 0

    def _serve(self, core: EngineCore) -> None:
        """Step while there is work; check integrity after IDLE_POLL_MS without any."""
        unchecked, can_check = False, core.ready.num_blocks <= MAX_CHECKED_BLOCKS
        while self._handle_messages(core):
            self._progress.turn()
            if core.has_work():
                self._outboxes.send(core.step())
                for answer in core.pop_answers():
                    self._outboxes.send(answer)
                unchecked = can_check
            elif unchecked:
                core.scheduler.check_integrity()
                unchecked = False

    def _handle_messages(self, core: EngineCore) -> bool:
        """Handle all pending messages, waiting for one if idle; False when it is time to end."""
        while self._inbox.poll(_wait_ms(core)):
            message = self._receive()
            if isinstance(message, Shutdown):
                return False
            if message is not None:
                self._handle(core, message)
        return not self._parent.is_gone()

    def _handle(self, core: EngineCore, message: CoreRequest) -> None:
        if isinstance(message, Attach):
            self._attach(core, message.front_end)
        elif isinstance(message, Detach):
            self._detach(core, message.front_end)
        elif not self._is_from_detached(message) and (answer := core.handle(message)) is not None:
            self._outboxes.send(answer)

    def _attach(self, core: EngineCore, front_end: int) -> None:
        if front_end not in self._gone:
            self._outboxes.open(front_end)
            self._outboxes.send_to(front_end, core.ready)

    def _detach(self, core: EngineCore, front_end: int) -> None:
        """Disconnect a front end and abort its requests; later ones may still arrive by another socket."""
        self._gone.add(front_end)
        self._outboxes.close(front_end)
        request_ids = [
            name for name in core.scheduler.request_ids() if front_end_of_request(name) == front_end
        ]
        self._handle(core, AbortRequests(request_ids))

    def _is_from_detached(self, message: CoreRequest) -> bool:
        if not self._gone or not isinstance(message, AddRequest):
            return False
        return front_end_of_request(message.request.request_id) in self._gone

    def _receive(self) -> CoreRequest | None:
        """Return the next message; None if it is malformed, which only a process of this user can have sent."""
        frame = self._inbox.recv()
        try:
            message: CoreRequest = self._decoder.decode(frame)
            return message
        except NO_MESSAGE as error:
            logger.error("a frame of %d bytes is not a message of a front end: %s", len(frame), error)
            return None

    def report_crash(self) -> None:
        """Report a crash of the core to the parent; the traceback is in the log."""
        self._outboxes.send(CoreFailed("the engine core failed; see its log for the traceback"))

    def close(self) -> None:
        """Close the sockets, and wait up to LINGER_MS for what is still to be sent."""
        self._context.destroy()


def _wait_ms(core: EngineCore) -> int:
    """Return the poll timeout in milliseconds."""
    if core.has_work():
        return 0
    return IDLE_POLL_MS if core.patience_s is None else max(1, int(core.patience_s * 1000))


def serve(directory: Path, parent_pid: int) -> int:
    """Run a core in a private directory until its parent ends it; return the exit code."""
    configure_logging()
    parent = ParentProcess(parent_pid, directory)
    parent.watch()
    service = CoreService(directory, parent)
    try:
        return service.run()
    except Exception:  # the last boundary of the process: log, report to the parent, exit with an error code
        logger.exception("the engine core failed")
        service.report_crash()
        return 1
    finally:
        service.close()
        parent.clean_up()
