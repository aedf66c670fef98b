"""Check of constraints within limits of CPU time and memory, in processes that can be killed.

Invariant: whatever a constraint does to the library (no end, all memory, a crash), it does it in a process of its own,
and the answer is an error with a reason. Such a process knows the 256 bytes as its tokens: what compiling takes depends
on the constraint and hardly on the vocabulary.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import IO

import msgspec

from quire.errors import UnavailableError, ValidationError
from quire.processes import start_python
from quire.structured_output.backends import AUTO
from quire.structured_output.check_messages import (
    INTERRUPTED,
    WALL_FACTOR,
    Answer,
    Question,
    is_stopped,
    read_frame,
    write_frame,
)
from quire.structured_output.params import StructuredOutputsParams, invalid
from quire.structured_output.settings import StructuredOutputsSettings
from quire.structured_output.turns import FairTurns, Turn

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""A process that forks has no threads of libraries, which a fork has not."""
GRACE_S = 5.0
"""More than its deadline that a checker gets to answer."""
START_S = 120.0
"""What it gets to start, on a machine with much else to do: some libraries take seconds to import on a quiet one."""
MAX_WAIT_S = 30.0
"""What a request waits for its turn, at least as long as two checks may take."""
POLL_S = 0.5
"""How often a process that should answer is asked for its state."""
NUM_TRIES = 2


class CheckLimitError(ValidationError):
    """The check met a limit of time or memory, which another check of the same constraint need not meet."""


class Checker:
    """Up to `num_checkers` processes, started when they are first needed.

    Threads may share one. A check needs a turn of the fair queue `turns`.
    """

    def __init__(self, settings: StructuredOutputsSettings) -> None:
        self._settings = settings
        self.turns = FairTurns(settings.num_checkers)
        self.max_wait_s = max(MAX_WAIT_S, 2 * settings.compile_timeout_s)
        self._lock = threading.Lock()
        self._idle: list[CheckProcess] = []
        self._busy: set[CheckProcess] = set()
        self._is_closed = False

    def checked(
        self, params: StructuredOutputsParams, turn: Turn, special: Sequence[str] = ()
    ) -> StructuredOutputsParams:
        """The constraint as it is to be compiled, once it is known to be good.

        Args:
            params: settled.
            turn: granted; is charged with the CPU time.
            special: literals of special tokens.

        Raises:
            CheckLimitError: it cannot be compiled within the limits.
            ValidationError: it cannot be compiled at all.
            UnavailableError: the processes were killed or stopped while they checked it.
        """
        answer = self._answer(params, special, turn)
        if answer.field:
            raise ValidationError(answer.error, param=answer.field)
        if answer.params is None:
            refusal = invalid(
                params.kind, answer.error if answer.error.startswith("at ") else f"is refused: {answer.error}"
            )
            raise refusal if answer.is_of_library else CheckLimitError(refusal.message, param=refusal.param)
        return answer.params

    def _answer(self, params: StructuredOutputsParams, special: Sequence[str], turn: Turn) -> Answer:
        for _ in range(NUM_TRIES):
            answer = self._ask(params, special)
            turn.cost_s += answer.cpu_s
            if not answer.was_interrupted:
                return answer
        raise UnavailableError(
            "the process that checks constraints was killed or stopped; try again", retry_after=2
        )

    def close(self) -> None:
        """End the processes; calling it twice is fine."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.stop()  # and who waits for its answer does the rest
        for process in idle:
            process.kill()

    def _ask(self, params: StructuredOutputsParams, special: Sequence[str]) -> Answer:
        process = self._take()
        question = Question(
            params,
            tuple(special),
            self._settings.backend,
            self._settings.compile_timeout_s,
            self._settings.compile_memory_mb,
            self._settings.mask_time_ms,
        )
        answer = process.ask(question, self._settings.compile_timeout_s * WALL_FACTOR + GRACE_S)
        self._put_back(process, is_well=answer is not None)
        return answer or INTERRUPTED

    def _take(self) -> CheckProcess:
        process = self._idle_process() or CheckProcess(self._settings.backend)
        with self._lock:
            self._busy.add(process)
            if self._is_closed:
                process.stop()
        return process

    def _idle_process(self) -> CheckProcess | None:
        """A process that waits for work; those that were killed or stopped meanwhile are reaped."""
        while True:
            with self._lock:
                self._check_open()
                process = self._idle.pop() if self._idle else None
            if process is None or process.is_well:
                return process
            process.kill()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("constraints are not checked any more, because the engine shuts down")

    def _put_back(self, process: CheckProcess, *, is_well: bool) -> None:
        with self._lock:
            self._busy.discard(process)
            if is_well and not self._is_closed:
                self._idle.append(process)
                return
        process.kill()


class CheckProcess:
    """The parent's end of a process of `check_process`, which ends when this end does.

    Args:
        backend: which it imports, before it says that it is ready.
    """

    def __init__(self, backend: str = AUTO) -> None:
        self._process = start_python(
            ["-m", "quire.structured_output.check_process", backend],
            os.environ | ONE_THREAD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._from, select.POLLIN)
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_well(self) -> bool:
        """Whether the process has neither ended nor been stopped."""
        return self.is_alive and not is_stopped(self._process.pid)

    def ask(self, question: Question, timeout_s: float) -> Answer | None:
        """The answer; None if there is none in time, or the process has ended or is stopped."""
        try:
            self._is_ready = self._is_ready or self._read(START_S) is not None
            if not self._is_ready:
                return None
            write_frame(self._to, msgspec.msgpack.encode(question))
            frame = self._read(timeout_s)
            return None if frame is None else msgspec.msgpack.decode(frame, type=Answer)
        except (OSError, msgspec.DecodeError):
            return None

    def _read(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._poll.poll(POLL_S * 1000):
                return read_frame(self._from)
            if is_stopped(self._process.pid):
                return None
        return None

    def stop(self) -> None:
        """End the process and its fork, also if they are stopped; who waits for an answer gets none."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process, and let go of what led to it; nobody may wait for an answer."""
        self.stop()
        self._process.wait()
        self._to.close()
        self._from.close()

    def __del__(self) -> None:
        if self._process.poll() is None:
            self.kill()
