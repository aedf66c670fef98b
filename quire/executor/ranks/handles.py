# SPDX-License-Identifier: Apache-2.0
"""Connections to all ranks of an engine, and their messages.

Invariant: there is one connection per rank, which ends when that is closed. Messages are msgspec frames, never pickle.
A rank answers every call. Only the first rank returns step results; the others send failures.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import msgspec

from quire import errors
from quire.errors import ClientError, EngineError, QuireError, RankLostError, StartupError
from quire.executor.ranks.rank_processes import DEATH_S, RankStarter
from quire.executor.ranks.wire import SPIN_S, RankWire
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput


class Step(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Request to execute a plan."""

    plan: SchedulerOutput


class RankCall(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Request to call one of `quire.executor.ranks.rank_process.CALLS` with plain data."""

    number: int
    method: str
    args: list[Any]


class StepResult(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Result of the oldest pending step."""

    output: ModelRunnerOutput


class CallReturned(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Result of a call, as plain data."""

    number: int
    result: Any


class CallFailed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Error of a call, or, with the number None, of a step, after which this rank executes none."""

    number: int | None
    kind: str
    message: str

    @staticmethod
    def from_error(error: BaseException, number: int | None = None) -> CallFailed:
        return CallFailed(number, type(error).__name__, str(error))

    def error(self, rank: int) -> QuireError:
        """Return the error: startup and client errors as they are, others with the rank's number."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, StartupError | ClientError):
            return kind(self.message)
        return EngineError(f"rank {rank} failed: {self.kind}: {self.message}")


ToRank = Step | RankCall
FromRank = StepResult | CallReturned | CallFailed


WAIT_MS = 500
STOPPED_POLLS = 10  # Consecutive waits of WAIT_MS without any message after which a stopped rank is given up.


class CallFuture(Future[Any]):
    """Future of the list of each rank's answer to one call, in rank order; waiting for it reads the ranks' messages."""

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
    """Connections to all ranks. Any thread may send; one thread receives.

    Raises:
        StartupError: not all ranks can be started; nothing is left behind.
    """

    def __init__(self, starter: RankStarter) -> None:
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromRank)
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._size = starter.size
        self._wires: list[RankWire] = []
        self._by_fd: dict[int, int] = {}
        self._outputs: deque[ModelRunnerOutput] = deque()
        self._calls: dict[int, tuple[CallFuture, dict[int, CallReturned | CallFailed]]] = {}
        self._num_calls = 0
        self._lost: Exception | None = None
        self._spins = False
        self._stopped: dict[int, int] = {}  # Rank -> consecutive polls in which it was stopped.
        self._starter = starter
        try:
            for way in starter.start():
                wire = RankWire(way)
                self._by_fd[wire.fileno()] = len(self._wires)
                self._wires.append(wire)
                self._poll.register(wire.fileno(), select.POLLIN)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any, answers: CallFuture | None = None) -> CallFuture:
        """Call a method on all ranks, after all earlier messages; the lowest rank's error counts."""
        answers = answers or CallFuture(self)
        with self._lock:
            number, self._num_calls = self._num_calls, self._num_calls + 1
            self._calls[number] = answers, {}
            self._broadcast(RankCall(number, method, list(args)))
        return answers

    def step(self, plan: SchedulerOutput) -> None:
        """Have all ranks execute a plan."""
        with self._lock:
            self._broadcast(Step(plan))

    def output(self) -> ModelRunnerOutput:
        """Wait for the result of the oldest pending step."""
        while not self._outputs:
            self.listen(wait=True)
        return self._outputs.popleft()

    def listen(self, *, wait: bool) -> None:
        """Process the ranks' messages; wait up to WAIT_MS if there are none.

        Raises:
            RankLostError: a rank has ended, or is stopped; later calls raise it again.
            EngineError: a step failed on a rank.
        """
        if self._lost is not None:
            raise self._lost
        ready = self._wait() if wait else self._poll.poll(0)
        for fd, _ in ready:
            self._receive(self._by_fd[fd])
        if wait and not ready:
            self._check_stopped()

    def close(self) -> None:
        """Stop all ranks; may be called twice."""
        for wire in self._wires:
            wire.close()
        self._wires = []
        self._starter.close()

    def _broadcast(self, message: Step | RankCall) -> None:
        frame = self._encoder.encode(message)
        for wire in self._wires:
            with contextlib.suppress(OSError):  # the receiving thread reports it
                wire.post(frame)

    def _receive(self, rank: int) -> None:
        try:
            for frame in self._wires[rank].frames():
                self._handle(self._decoder.decode(frame), rank)
        except EOFError:
            self._fail(self._death(rank))

    def _handle(self, message: FromRank, rank: int) -> None:
        if isinstance(message, StepResult):
            self._outputs.append(message.output)
        elif message.number is None:
            self._fail(self._cause(message, rank))
        else:
            self._record_answer(rank, message)

    def _wait(self) -> list[tuple[int, int]]:
        """Poll for messages; spins first if the last wait was short, because ranks of slow steps need all cores."""
        began = time.perf_counter()
        ready: list[tuple[int, int]] = []
        while self._spins and not ready and time.perf_counter() - began < SPIN_S:
            ready = self._poll.poll(0)
        ready = ready or self._poll.poll(WAIT_MS)
        self._spins = time.perf_counter() - began < SPIN_S
        return ready

    def _check_stopped(self) -> None:
        """Detect stopped ranks, which never close their connection."""
        stopped = self._starter.stopped()
        self._stopped = {rank: self._stopped.get(rank, 0) + 1 for rank in stopped}
        for rank, said in stopped.items():
            if self._stopped[rank] >= STOPPED_POLLS:
                self._fail(RankLostError([rank], said))

    def _record_answer(self, rank: int, answer: CallReturned | CallFailed) -> None:
        assert answer.number is not None
        answers, given = self._calls[answer.number]
        given[rank] = answer
        if len(given) == self._size:
            del self._calls[answer.number]
            resolve_call(answers, [given[rank] for rank in range(len(given))])

    def _fail(self, error: Exception) -> NoReturn:
        self._lost = error
        raise error

    def _cause(self, failure: CallFailed, rank: int) -> Exception:
        """Return the root cause: a rank that lost another may report before that one fails or ends."""
        until = time.monotonic() + DEATH_S
        said, who = failure, rank
        while said.kind == RankLostError.__name__:
            self._poll.unregister(self._wires[who].fileno())
            ready = self._poll.poll(max(until - time.monotonic(), 0) * 1000)
            if not ready:
                return failure.error(rank)
            who = self._by_fd[ready[0][0]]
            try:
                said = self._step_failure(who)
            except EOFError:
                return self._death(who)
        return said.error(who)

    def _step_failure(self, rank: int) -> CallFailed:
        """Return a rank's step failure; raises EOFError if it ends without one."""
        while True:
            message = self._decoder.decode(self._wires[rank].recv())
            if isinstance(message, CallFailed) and message.number is None:
                return message

    def _death(self, rank: int) -> RankLostError:
        return RankLostError([rank], self._starter.why_gone(rank))


def resolve_call(answers: CallFuture, given: Sequence[CallReturned | CallFailed]) -> None:
    """Resolve a call with its results, or the first error."""
    failures = [(rank, answer) for rank, answer in enumerate(given) if isinstance(answer, CallFailed)]
    if failures:
        rank, failure = failures[0]
        answers.set_exception(failure.error(rank))
    else:
        answers.set_result([answer.result for answer in given if isinstance(answer, CallReturned)])
