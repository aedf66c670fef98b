# SPDX-License-Identifier: Apache-2.0
"""Pool of decoding processes, each killed when its job takes too long or its client is gone.

Invariant: whatever an image does to a decoder (no end, all memory, a crash), it happens in a separate process and costs
that image only; the next job gets another process.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import IO

import msgspec

from quire.errors import UnavailableError, ValidationError
from quire.multimodal.door.decoding import name_of
from quire.multimodal.door.jobs import DecodeJob, DecodeReply, DecodeSetup
from quire.processes import ONE_THREAD, exit_reason, read_frame, start_python, write_frame

START_S = 120.0  # To start on a busy machine; imports take a third of a second on an idle one.
POLL_S = 0.5


class Ticket:
    """Handle of one job, to cancel it from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _DecodeProcess | None = None
        self._is_cancelled = False

    def is_cancelled(self) -> bool:
        """Return whether the job was cancelled; it may be at any time."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Kill the process that works on the job; the waiting thread then returns."""
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.stop()

    def work_on(self, process: _DecodeProcess | None) -> None:
        """Set the process that works on the job; None once it no longer does."""
        with self._lock:
            self._process = process
            if process is not None and self._is_cancelled:
                process.stop()


class DecodePool:
    """Processes, started on demand and reused; thread-safe. The caller bounds the number of jobs at once."""

    def __init__(self, setup: DecodeSetup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._idle: list[_DecodeProcess] = []
        self._busy: set[_DecodeProcess] = set()
        self._is_closed = False

    def run(self, job: DecodeJob, ticket: Ticket, limit_s: float) -> DecodeReply:
        """Return a job's result; blocks.

        Raises:
            ValidationError: decoding takes longer than the limit, or crashes the decoder.
            UnavailableError: the processes cannot be started, the job was cancelled, or the pool is closed.
        """
        process = self._pop()
        try:
            ticket.work_on(process)
            reply = process.ask(job, limit_s)
        finally:
            ticket.work_on(None)
            self._put_back(process)
        if reply is not None:
            return reply
        if ticket.is_cancelled() or self._is_closed:
            raise UnavailableError("the request was cancelled while its media were decoded")
        raise process.failure(limit_s, name_of(job.kind))

    def warm_up(self) -> None:
        """Start a process for the first job; blocks. A process that does not start is left to that job."""
        try:
            process = self._pop()
        except UnavailableError:
            return
        try:
            process.warm_up()
        finally:
            self._put_back(process)

    def close(self) -> None:
        """End all processes; idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.stop()
        for process in idle:
            process.kill()

    def _pop(self) -> _DecodeProcess:
        while True:
            with self._lock:
                if self._is_closed:
                    raise UnavailableError("images cannot be decoded: the engine is shutting down")
                process = self._idle.pop() if self._idle else None
            if process is None:
                process = _DecodeProcess(self._setup)
            elif not process.is_alive:
                process.kill()
                continue
            with self._lock:
                self._busy.add(process)
            return process

    def _put_back(self, process: _DecodeProcess) -> None:
        with self._lock:
            self._busy.discard(process)
            if process.is_idle and not self._is_closed:
                self._idle.append(process)
                return
        process.kill()


class _DecodeProcess:
    """Parent's handle of a `decode_process`, which exits when the handle's pipes close."""

    def __init__(self, setup: DecodeSetup) -> None:
        try:
            self._process = start_python(
                ["-m", "quire.multimodal.door.decode_process"],
                os.environ | ONE_THREAD,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
            )
        except OSError as error:
            raise UnavailableError(f"no process to decode images can be started: {error.strerror}") from None
        if self._process.stdin is None or self._process.stdout is None:
            raise UnavailableError("the process that decodes images has no pipes")
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._from, select.POLLIN)
        self._setup = setup
        self._has_started = False
        self._was_late = False
        self.is_idle = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def warm_up(self) -> None:
        """Start it without a job."""
        with suppress(OSError):
            self.is_idle = self._has_started or self._start()

    def ask(self, job: DecodeJob, limit_s: float) -> DecodeReply | None:
        """Return the result; None if the process is late or has ended."""
        self.is_idle = False
        try:
            if not self._has_started and not self._start():
                return None
            write_frame(self._to, msgspec.msgpack.encode(job))
            frame = self._read(limit_s)
            reply = None if frame is None else msgspec.msgpack.decode(frame, type=DecodeReply)
        except (OSError, msgspec.DecodeError):
            return None
        self.is_idle = reply is not None
        return reply

    def failure(self, limit_s: float, name: str) -> ValidationError | UnavailableError:
        """Return the error of a job without a result."""
        if not self._has_started:
            return UnavailableError("the process that decodes images did not start; see the server's log")
        if self._was_late:
            return ValidationError(
                f"the {name} takes longer than {limit_s:g} s to decode and resize; send a smaller one",
                param="messages",
            )
        how = exit_reason(self._process.wait())
        return ValidationError(
            f"the {name} crashes its decoder ({how}); send it in another format", param="messages"
        )

    def stop(self) -> None:
        """Kill the process; a waiting thread gets no result."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and close its pipes; no thread may be waiting for a result."""
        self.stop()
        self._process.wait()
        for pipe in (self._to, self._from):
            with suppress(BrokenPipeError):
                pipe.close()

    def _start(self) -> bool:
        write_frame(self._to, msgspec.msgpack.encode(self._setup))
        self._has_started = self._read(START_S) is not None
        return self._has_started

    def _read(self, limit_s: float) -> bytes | None:
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self._poll.poll(min(left_s, POLL_S) * 1000):
                return read_frame(self._from)
        self._was_late = True
        return None

    def __del__(self) -> None:
        if hasattr(self, "_process") and self.is_alive:
            self.kill()
