"""The engine core behind sockets: messages of front ends in, outputs to each of them.

Invariant: single-threaded apart from kernels and the watch over its parent; reads `config.json` and one ipc socket in
the private directory it is given, sends each front end its outputs on a socket of that one's, writes its progress to
`progress`, reports to its parent how it ended, and never outlives it. A frame that is no message costs a line in the
log.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import zmq

from quire import private_directories
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.core_ids import front_end_of_request
from quire.engine.lockstep import Lockstep, Peers, place_of_replica
from quire.engine.messages import (
    NO_MESSAGE,
    AbortRequests,
    AddRequest,
    Attach,
    CoreFailed,
    CoreRequest,
    Detach,
    Shutdown,
)
from quire.engine.outboxes import Outboxes
from quire.engine.parent import Parent
from quire.engine.progress import Progress
from quire.engine.remote import CONFIG, PROGRESS, REQUESTS
from quire.errors import EngineError, StartupError
from quire.executor.base import resolve_executor
from quire.logging_setup import configure_logging
from quire.processes import settle_garbage, uncollected

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 1000
MAX_CHECKED_BLOCKS = 100_000
"""A larger cache is not checked when the core is idle: a request that comes then would wait for it, 0.2 s and more."""


class CoreService:
    """Drains the request socket, steps the core while it has work, sends what comes out."""

    def __init__(self, directory: Path, parent: Parent) -> None:
        self._parent = parent
        self._config = EngineConfig.decoded((directory / CONFIG).read_bytes())
        if self._config.share is not None and self._config.share.processors:
            os.sched_setaffinity(
                0, self._config.share.processors
            )  # before there are threads, which inherit it
        context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(f"ipc://{directory / REQUESTS}")
        self._outboxes = Outboxes(context, directory)
        self._lockstep = self._join_replicas(context)
        self._gone: set[int] = set()
        self._decoder = msgspec.msgpack.Decoder(CoreRequest)
        self._progress = Progress(directory / PROGRESS)
        configure_logging(self._config.observability.log_level, self._config.observability.log_format)

    def _join_replicas(self, context: zmq.Context[zmq.Socket[bytes]]) -> Lockstep | None:
        """With those that share experts with this one, which hears of their steps as of all else."""
        parallel = self._config.parallel
        if not parallel.shares_experts:
            return None
        directory, own = Path(self._config.meeting), parallel.first_replica
        self._inbox.bind(place_of_replica(directory, own))
        others = [number for number in range(parallel.data_parallel_size) if number != own]
        return Lockstep(Peers(context, directory, others).tell)

    def run(self) -> int:
        """Load, serve until told to stop; returns the exit code."""
        try:
            return self._run()
        finally:
            if self._config.meeting:  # nobody goes on without this replica
                private_directories.remove(Path(self._config.meeting))

    def _run(self) -> int:
        try:
            with uncollected():
                resolve_executor(self._config.parallel.distributed_executor_backend)
            core = EngineCore(self._config, progress=self._progress, lockstep=self._lockstep)
        except StartupError as error:
            self._outboxes.send(CoreFailed(str(error)))
            return 1
        settle_garbage()
        self._outboxes.send(core.ready)
        try:
            self._serve(core)
        except EngineError as error:
            if self._lockstep is None:
                raise
            logger.error("the replica ends: %s", error)  # mostly with another, whose log says more
            self._outboxes.send(CoreFailed(str(error)))
            return 1
        finally:
            core.shutdown()
        return 0

    def _serve(self, core: EngineCore) -> None:
        """Step while there is work; whenever that is followed by IDLE_POLL_MS without any, look whether all is well."""
        unchecked, can_check = False, core.ready.num_blocks <= MAX_CHECKED_BLOCKS
        while self._handle_messages(core):
            self._progress.turn()
            if core.has_work():
                self._outboxes.send(core.step())
                for answer in core.take_answers():
                    self._outboxes.send(answer)
                unchecked = can_check
            elif unchecked:
                core.scheduler.check_integrity()
                unchecked = False

    def _handle_messages(self, core: EngineCore) -> bool:
        """Handle all waiting messages, waiting for one if idle; False when it is time to end."""
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
        elif not self._is_of_the_gone(message) and (answer := core.handle(message)) is not None:
            self._outboxes.send(answer)

    def _attach(self, core: EngineCore, front_end: int) -> None:
        if front_end not in self._gone:
            self._outboxes.open(front_end)
            self._outboxes.tell(front_end, core.ready)

    def _detach(self, core: EngineCore, front_end: int) -> None:
        """What it has asked for may yet come in behind this, by another way."""
        self._gone.add(front_end)
        self._outboxes.close(front_end)
        asked = [name for name in core.scheduler.request_ids() if front_end_of_request(name) == front_end]
        self._handle(core, AbortRequests(asked))

    def _is_of_the_gone(self, message: CoreRequest) -> bool:
        if not self._gone or not isinstance(message, AddRequest):
            return False
        return front_end_of_request(message.request.request_id) in self._gone

    def _receive(self) -> CoreRequest | None:
        """The next message; None if it is none of ours, which only somebody with our user id can have sent."""
        frame = self._inbox.recv()
        try:
            message: CoreRequest = self._decoder.decode(frame)
            return message
        except NO_MESSAGE as error:
            logger.error("a frame of %d bytes is no message of a front end: %s", len(frame), error)
            return None

    def report_crash(self) -> None:
        """Tell the parent that a bug of ours ends the core; the traceback is in the log."""
        self._outboxes.send(CoreFailed("the engine core failed; see its log for the traceback"))


def _wait_ms(core: EngineCore) -> int:
    """How long to wait for a message."""
    if core.has_work():
        return 0
    return IDLE_POLL_MS if core.patience_s is None else max(1, int(core.patience_s * 1000))


def serve(directory: Path, parent_pid: int) -> int:
    """Run a core in a private directory until its parent ends it; returns the exit code."""
    configure_logging()
    parent = Parent(parent_pid, directory)
    parent.watch()
    service = CoreService(directory, parent)
    try:
        return service.run()
    except Exception:  # the last boundary of the process: log, tell the parent, end with an error code
        logger.exception("the engine core failed")
        service.report_crash()
        return 1
    finally:
        parent.clean_up()
