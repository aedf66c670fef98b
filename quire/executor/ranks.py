"""All ranks of an engine, on this host and on others: spoken to, listened to and ended, all alike.

Invariant: there is one socket to each, of which it has the other end, and it ends when that is closed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec

from quire.config import EngineConfig
from quire.errors import RankLostError
from quire.executor.hosts import Gate
from quire.executor.messages import Call, Failed, FromRank, Returned, Step, Stepped
from quire.executor.rank_processes import DEATH_S, PROGRAM, RankProcesses
from quire.processes import STOPPED
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput

LOOPBACK = "127.0.0.1"
WAIT_MS = 500
LOOKS_AT_STOPPED = 10
"""After so many times WAIT_MS without a word from anybody a rank that is stopped is given up."""


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
    """Processes of a program for Python, and those that other hosts bring. Any thread may send messages; one listens.

    Raises:
        StartupError: the machine refuses a process or room for a file, or another host does not come; nothing is left
            behind.
    """

    def __init__(self, config: EngineConfig, size: int, program: Sequence[str] = PROGRAM) -> None:
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromRank)
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._size = size
        self._connections: list[Connection] = []
        self._by_fd: dict[int, int] = {}
        self._outputs: deque[ModelRunnerOutput] = deque()
        self._calls: dict[int, tuple[Answers, dict[int, Returned | Failed]]] = {}
        self._num_calls = 0
        self._lost: Exception | None = None
        self._stopped: dict[int, int] = {}
        """How often in turn a rank was seen to be stopped."""
        self._gate = Gate(config.parallel) if config.parallel.nnodes > 1 else None
        self._here = RankProcesses(config, size, program)
        try:
            self._begin({} if self._gate is None else self._gate.let_in())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank of this host."""
        return self._here.pids

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
            RankLostError: a rank has ended, or is stopped; so will this raise from now on.
            EngineError: a step failed on one.
        """
        if self._lost is not None:
            raise self._lost
        ready = self._poll.poll(WAIT_MS if wait else 0)
        for fd, _ in ready:
            self._hear(self._by_fd[fd])
        if wait and not ready:
            self._look()

    def have_met(self) -> None:
        """All ranks know each other and have read what they are to do."""
        self._here.have_met()

    def close(self) -> None:
        """End all ranks; twice is fine."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._here.close()
        if self._gate is not None:
            self._gate.close()

    def _begin(self, guests: Mapping[int, socket.socket]) -> None:
        """Start those ranks that no other host has brought; they have come to its address for all."""
        address = next((guest.getsockname()[0] for guest in guests.values()), LOOPBACK)
        for rank in range(self._size):
            connection = Connection((guests.get(rank) or self._here.start(rank, address)).detach())
            self._by_fd[connection.fileno()] = len(self._connections)
            self._connections.append(connection)
            self._poll.register(connection.fileno(), select.POLLIN)

    def _tell(self, message: Step | Call) -> None:
        frame = self._encoder.encode(message)
        for connection in self._connections:
            with contextlib.suppress(OSError):  # whoever listens hears of it
                connection.send_bytes(frame)

    def _hear(self, rank: int) -> None:
        try:
            message = self._decoder.decode(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            self._fail(self._death(rank))
        if isinstance(message, Stepped):
            self._outputs.append(message.output)
        elif message.number is None:
            self._fail(self._cause(message, rank))
        else:
            self._note(rank, message)

    def _look(self) -> None:
        """Of a rank that is stopped, and not by whoever stops the core as well, nobody would ever hear."""
        stopped = self._here.stopped()
        self._stopped = {rank: self._stopped.get(rank, 0) + 1 for rank in stopped}
        for rank in stopped:
            if self._stopped[rank] >= LOOKS_AT_STOPPED:
                self._fail(RankLostError([rank], f"process {self.pids[rank]} {STOPPED}"))

    def _note(self, rank: int, answer: Returned | Failed) -> None:
        assert answer.number is not None
        answers, given = self._calls[answer.number]
        given[rank] = answer
        if len(given) == self._size:
            del self._calls[answer.number]
            settle(answers, [given[rank] for rank in range(len(given))])

    def _fail(self, error: Exception) -> NoReturn:
        self._lost = error
        raise error

    def _cause(self, failure: Failed, rank: int) -> Exception:
        """A rank that has lost another may be heard before that one, or its end."""
        until = time.monotonic() + DEATH_S
        said, who = failure, rank
        while said.kind == RankLostError.__name__:
            self._poll.unregister(self._connections[who].fileno())
            ready = self._poll.poll(max(until - time.monotonic(), 0) * 1000)
            if not ready:
                return failure.error(rank)
            who = self._by_fd[ready[0][0]]
            try:
                said = self._last_words(who)
            except (EOFError, OSError):
                return self._death(who)
        return said.error(who)

    def _last_words(self, rank: int) -> Failed:
        """Why a step failed on a rank; raises EOFError if it ends without having said."""
        while True:
            message = self._decoder.decode(self._connections[rank].recv_bytes())
            if isinstance(message, Failed) and message.number is None:
                return message

    def _death(self, rank: int) -> RankLostError:
        if rank in self._here.pids:
            return RankLostError([rank], self._here.why_gone(rank))
        return RankLostError([rank], "its host has ended it, or is gone itself")


def settle(answers: Answers, given: Sequence[Returned | Failed]) -> None:
    """Give a call its result, or the first error."""
    failures = [(rank, answer) for rank, answer in enumerate(given) if isinstance(answer, Failed)]
    if failures:
        rank, failure = failures[0]
        answers.set_exception(failure.error(rank))
    else:
        answers.set_result([answer.result for answer in given if isinstance(answer, Returned)])
