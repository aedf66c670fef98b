# SPDX-License-Identifier: Apache-2.0
"""Checks of constraints within limits of CPU time and memory, in processes that can be killed.

Invariant: whatever a constraint does to the library (no end, all memory, a crash), it happens in a separate process
and results in an error with a reason. That process uses the 256 bytes as its vocabulary, because compile cost depends
on the constraint and hardly on the vocabulary. Frames over pipes carry requests and results.
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
from quire.processes import ONE_THREAD, read_frame, start_python, write_frame
from quire.structured_output.backends import AUTO
from quire.structured_output.turns import FairTurns, Turn
from quire.structured_outputs_params import StructuredOutputsParams, StructuredOutputsSettings, invalid

WALL_FACTOR = (
    30.0  # wall time over CPU time; a loose backstop, because a busy machine gives a check little CPU
)


class CheckRequest(msgspec.Struct, array_like=True, frozen=True):
    """Request to compile a normalized constraint within seconds of CPU time and MiB of memory."""

    params: StructuredOutputsParams
    special: tuple[str, ...]
    backend: str
    timeout_s: float
    memory_mb: int
    mask_time_ms: float


class CheckResult(msgspec.Struct, array_like=True, frozen=True):
    """Result of a check.

    Attributes:
        params: constraint to compile; None if it is refused or unknown.
        error: reason of a refusal; the whole message if another `field` is at fault.
        is_of_library: True if the library refused it; else a limit of time or memory was hit, which may not recur.
        was_interrupted: True if the check was killed or stopped from outside, without a verdict.
        cpu_s: seconds of CPU time.
    """

    params: StructuredOutputsParams | None = None
    error: str = ""
    field: str = ""
    is_of_library: bool = True
    was_interrupted: bool = False
    cpu_s: float = 0.0


INTERRUPTED = CheckResult(was_interrupted=True)


def is_stopped(child: int) -> bool:
    """Return whether a child was stopped by a signal; False where the system cannot tell."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has exited and was reaped
        return False


GRACE_S = 5.0  # time that a checker gets beyond its deadline
START_S = 120.0  # time to start on a busy machine; imports take seconds on an idle one
MAX_WAIT_S = 30.0  # wait for a turn, but at least the time of two checks
POLL_S = 0.5  # interval at which the state of a checker is polled
NUM_TRIES = 2


class CheckLimitError(ValidationError):
    """The check hit a limit of time or memory, which another check of the constraint may not hit."""


class Checker:
    """Up to `num_checkers` processes, started on demand.

    Thread-safe. A check needs a turn of the fair queue `turns`.
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
        """Return the constraint to compile, after a successful check.

        Args:
            params: normalized constraint.
            turn: granted turn, charged with the CPU time.
            special: literals of special tokens.

        Raises:
            CheckLimitError: it cannot be compiled within the limits.
            ValidationError: it cannot be compiled at all.
            UnavailableError: the processes were killed or stopped during the check.
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

    def _answer(self, params: StructuredOutputsParams, special: Sequence[str], turn: Turn) -> CheckResult:
        for _ in range(NUM_TRIES):
            answer = self._ask(params, special)
            turn.cost_s += answer.cpu_s
            if not answer.was_interrupted:
                return answer
        raise UnavailableError(
            "the process that checks constraints was killed or stopped; try again", retry_after=2
        )

    def close(self) -> None:
        """End the processes; idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.stop()  # the waiting thread does the rest
        for process in idle:
            process.kill()

    def _ask(self, params: StructuredOutputsParams, special: Sequence[str]) -> CheckResult:
        process = self._take()
        question = CheckRequest(
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
            raise UnavailableError("constraints cannot be checked: the engine is shutting down")

    def _put_back(self, process: CheckProcess, *, is_well: bool) -> None:
        with self._lock:
            self._busy.discard(process)
            if is_well and not self._is_closed:
                self._idle.append(process)
                return
        process.kill()


class CheckProcess:
    """Parent's handle of a `check_process`, which exits when the handle's pipes close.

    Args:
        backend: backend that it imports before it reports ready.
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
        """True if the process has neither exited nor been stopped."""
        return self.is_alive and not is_stopped(self._process.pid)

    def ask(self, question: CheckRequest, timeout_s: float) -> CheckResult | None:
        """Return the result; None on a timeout, or if the process has exited or is stopped."""
        try:
            self._is_ready = self._is_ready or self._read(START_S) is not None
            if not self._is_ready:
                return None
            write_frame(self._to, msgspec.msgpack.encode(question))
            frame = self._read(timeout_s)
            return None if frame is None else msgspec.msgpack.decode(frame, type=CheckResult)
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
        """Kill the process and its fork, even if stopped; a waiting thread gets no result."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and close its pipes; no thread may be waiting for a result."""
        self.stop()
        self._process.wait()
        self._to.close()
        self._from.close()

    def __del__(self) -> None:
        if self._process.poll() is None:
            self.kill()
