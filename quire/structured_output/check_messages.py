"""What a checker asks the process that compiles constraints, and what that answers: frames over a pipe."""

from __future__ import annotations

import os
import struct
from typing import IO

import msgspec

from quire.structured_output.params import StructuredOutputsParams

SIZE = struct.Struct("<I")
WALL_FACTOR = 30.0  # wall time over CPU time, a far backstop: a busy machine gives a check little of a core


class Question(msgspec.Struct, array_like=True, frozen=True):
    """Whether a settled constraint compiles, within seconds of CPU time and MiB of memory."""

    params: StructuredOutputsParams
    special: tuple[str, ...]
    backend: str
    timeout_s: float
    memory_mb: int
    mask_time_ms: float


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """Result of a check.

    Attributes:
        params: the constraint as it is to be compiled; None if it is refused or nothing is known.
        error: why it is refused; the whole message if another `field` is to blame.
        is_of_library: the library said so. Otherwise the check met a limit of time or memory, which the next one need
            not meet.
        was_interrupted: the check was killed or stopped by others, and says nothing of the constraint.
        cpu_s: seconds of CPU time.
    """

    params: StructuredOutputsParams | None = None
    error: str = ""
    field: str = ""
    is_of_library: bool = True
    was_interrupted: bool = False
    cpu_s: float = 0.0


INTERRUPTED = Answer(was_interrupted=True)


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the stream."""
    head = stream.read(SIZE.size)
    return stream.read(SIZE.unpack(head)[0]) if len(head) == SIZE.size else None


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    stream.write(SIZE.pack(len(frame)) + frame)
    stream.flush()


def is_stopped(child: int) -> bool:
    """Whether a child was stopped by a signal, and so will not answer; False where the system cannot tell."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended, and its exit status was read
        return False
