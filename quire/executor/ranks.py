"""All ranks of an engine, whoever has started them: spoken to and listened to, all alike.

Invariant: there is one connection to each, of which it has the other end, and it ends when that is closed.
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

from quire.errors import RankLostError
from quire.executor.messages import Call, Failed, FromRank, Returned, Step, Stepped
from quire.executor.rank_processes import DEATH_S
from quire.executor.starter import Starter
from quire.executor.wire import SPIN_S, Wire
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput

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
    """Those that somebody starts. Any thread may send messages; one listens.

    Raises:
        StartupError: not all can be started; nothing is left behind.
    """

    def __init__(self, starter: Starter) -> None:
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromRank)
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._size = starter.size
        self._wires: list[Wire] = []
        self._by_fd: dict[int, int] = {}
        self._outputs: deque[ModelRunnerOutput] = deque()
        self._calls: dict[int, tuple[Answers, dict[int, Returned | Failed]]] = {}
        self._num_calls = 0
        self._lost: Exception | None = None
        self._spins = False
        self._stopped: dict[int, int] = {}
        """How often in turn a rank was seen to be stopped."""
        self._starter = starter
        try:
            for way in starter.start():
                wire = Wire(way)
                self._by_fd[wire.fileno()] = len(self._wires)
                self._wires.append(wire)
                self._poll.register(wire.fileno(), select.POLLIN)
        except BaseException:
            self.close()
            raise

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
        ready = self._wait() if wait else self._poll.poll(0)
        for fd, _ in ready:
            self._hear(self._by_fd[fd])
        if wait and not ready:
            self._look()

    def close(self) -> None:
        """End all ranks; twice is fine."""
        for wire in self._wires:
            wire.close()
        self._wires = []
        self._starter.close()

    def _tell(self, message: Step | Call) -> None:
        frame = self._encoder.encode(message)
        for wire in self._wires:
            with contextlib.suppress(OSError):  # whoever listens hears of it
                wire.post(frame)

    def _hear(self, rank: int) -> None:
        try:
            for frame in self._wires[rank].frames():
                self._take(self._decoder.decode(frame), rank)
        except EOFError:
            self._fail(self._death(rank))

    def _take(self, message: FromRank, rank: int) -> None:
        if isinstance(message, Stepped):
            self._outputs.append(message.output)
        elif message.number is None:
            self._fail(self._cause(message, rank))
        else:
            self._note(rank, message)

    def _wait(self) -> list[tuple[int, int]]:
        """Whom to hear; spins a while if the last word came soon. Ranks of slow steps need all cores."""
        began = time.perf_counter()
        ready: list[tuple[int, int]] = []
        while self._spins and not ready and time.perf_counter() - began < SPIN_S:
            ready = self._poll.poll(0)
        ready = ready or self._poll.poll(WAIT_MS)
        self._spins = time.perf_counter() - began < SPIN_S
        return ready

    def _look(self) -> None:
        """Of a rank that is stopped, and not by whoever stops the core as well, nobody would ever hear."""
        stopped = self._starter.stopped()
        self._stopped = {rank: self._stopped.get(rank, 0) + 1 for rank in stopped}
        for rank, said in stopped.items():
            if self._stopped[rank] >= LOOKS_AT_STOPPED:
                self._fail(RankLostError([rank], said))

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
            self._poll.unregister(self._wires[who].fileno())
            ready = self._poll.poll(max(until - time.monotonic(), 0) * 1000)
            if not ready:
                return failure.error(rank)
            who = self._by_fd[ready[0][0]]
            try:
                said = self._last_words(who)
            except EOFError:
                return self._death(who)
        return said.error(who)

    def _last_words(self, rank: int) -> Failed:
        """Why a step failed on a rank; raises EOFError if it ends without having said."""
        while True:
            message = self._decoder.decode(self._wires[rank].recv())
            if isinstance(message, Failed) and message.number is None:
                return message

    def _death(self, rank: int) -> RankLostError:
        return RankLostError([rank], self._starter.why_gone(rank))


def settle(answers: Answers, given: Sequence[Returned | Failed]) -> None:
    """Give a call its result, or the first error."""
    failures = [(rank, answer) for rank, answer in enumerate(given) if isinstance(answer, Failed)]
    if failures:
        rank, failure = failures[0]
        answers.set_exception(failure.error(rank))
    else:
        answers.set_result([answer.result for answer in given if isinstance(answer, Returned)])
