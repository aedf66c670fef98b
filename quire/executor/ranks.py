"""Ranks that are child processes: started, spoken to, watched and ended.

Invariant: a rank knows of its parent by one Unix socket, of which each side has an end, and ends when the other is
closed; so no rank outlives whoever started it. The private directory is gone once all ranks have met.
"""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from quire.config import EngineConfig
from quire.errors import RankLostError, StartupError
from quire.executor.messages import Call, Failed, FromRank, Returned, Step, Stepped
from quire.processes import exit_reason
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput

CLOSE_TIMEOUT_S = 5.0
WAIT_MS = 500
DEATH_S = 1.0
"""How long a rank that others have lost may take to be seen as dead."""


class Answers(Future[Any]):
    """A list of each rank's answer to one call, in their order; whoever asks for them reads what ranks have said."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def done(self) -> bool:
        if not super().done():
            self._ranks.listen(wait=False)
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        while not super().done():
            self._ranks.listen(wait=True)
        return super().result()


class Ranks:
    """So many processes of `quire.executor.rank_process`. Messages may be sent by any thread; one listens.

    Raises:
        StartupError: the machine refuses a process or room for a file; nothing is left behind.
    """

    def __init__(self, config: EngineConfig, size: int) -> None:
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromRank)
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._by_fd: dict[int, int] = {}
        self._outputs: deque[ModelRunnerOutput] = deque()
        self._calls: dict[int, tuple[Answers, dict[int, Returned | Failed]]] = {}
        self._num_calls = 0
        self._lost: Exception | None = None
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
            (self._directory / "config.json").write_bytes(msgspec.json.encode(config))
            for rank in range(size):
                self._start(rank, size)
        except OSError as error:
            self.close()
            raise StartupError(
                f"a rank cannot be started: {error}; look at TMPDIR, at the room there and at ulimit -a"
            ) from error

    @property
    def pids(self) -> list[int]:
        """Each rank's process."""
        return [process.pid for process in self._processes]

    def call(self, method: str, *args: Any, answers: Answers | None = None) -> Answers:
        """Have all ranks do something, behind what they were told before; of errors, that of the lowest rank counts."""
        answers = answers or Answers(self)
        with self._lock:
            number, self._num_calls = self._num_calls, self._num_calls + 1
            self._calls[number] = answers, {}
            self._tell(Call(number, method, list(args)))
        return answers

    def step(self, plan: SchedulerOutput) -> None:
        """Have all ranks execute a plan."""
        with self._lock:
            self._tell(Step(plan))

    def output(self) -> ModelRunnerOutput:
        """Wait for the result of the oldest step that has not been asked for."""
        while not self._outputs:
            self.listen(wait=True)
        return self._outputs.popleft()

    def listen(self, *, wait: bool) -> None:
        """Take in what ranks have said; wait a while if they have said nothing.

        Raises:
            RankLostError: a rank has ended; so will this raise from now on.
            EngineError: a step failed on one.
        """
        if self._lost is not None:
            raise self._lost
        for fd, _ in self._poll.poll(WAIT_MS if wait else 0):
            self._hear(self._by_fd[fd])

    def have_met(self) -> None:
        """All ranks know each other and have read what they are to do."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """End all ranks; twice is fine."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        for process in self._processes:
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if hasattr(self, "_directory"):
            self.have_met()

    def _start(self, rank: int, size: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            place = [str(self._directory), str(rank), str(size), str(theirs.fileno())]
            command = [sys.executable, "-m", "quire.executor.rank_process", *place]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._processes.append(process)
        connection = Connection(ours.detach())
        self._connections.append(connection)
        self._by_fd[connection.fileno()] = rank
        self._poll.register(connection.fileno(), select.POLLIN)

    def _tell(self, message: Step | Call) -> None:
        frame = self._encoder.encode(message)
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # whoever listens hears of it
                connection.send_bytes(frame)

    def _hear(self, rank: int) -> None:
        try:
            message = self._decoder.decode(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._fail(self._death(rank))
        if isinstance(message, Stepped):
            self._outputs.append(message.output)
        elif message.number is None:
            self._fail(self._cause(message, rank))
        else:
            self._note(rank, message)

    def _note(self, rank: int, answer: Returned | Failed) -> None:
        assert answer.number is not None
        answers, given = self._calls[answer.number]
        given[rank] = answer
        if len(given) == len(self._processes):
            del self._calls[answer.number]
            settle(answers, [given[rank] for rank in range(len(given))])

    def _fail(self, error: Exception) -> NoReturn:
        self._lost = error
        raise error

    def _cause(self, failure: Failed, rank: int) -> Exception:
        """A rank that has lost another says so before that one's own end is heard of."""
        if failure.kind == RankLostError.__name__:
            with contextlib.suppress(subprocess.TimeoutExpired):
                for other, process in enumerate(self._processes):
                    if other != rank and process.wait(DEATH_S / len(self._processes)) is not None:
                        return self._death(other)
        return failure.error(rank)

    def _death(self, rank: int) -> RankLostError:
        try:
            how = exit_reason(self._processes[rank].wait(DEATH_S))
        except subprocess.TimeoutExpired:
            how = "it has closed its socket"
        return RankLostError([rank], f"process {self._processes[rank].pid}: {how}")


def settle(answers: Answers, given: Sequence[Returned | Failed]) -> None:
    """Give a call its result, or the first error."""
    failures = [(rank, answer) for rank, answer in enumerate(given) if isinstance(answer, Failed)]
    if failures:
        rank, failure = failures[0]
        answers.set_exception(failure.error(rank))
    else:
        answers.set_result([answer.result for answer in given if isinstance(answer, Returned)])
