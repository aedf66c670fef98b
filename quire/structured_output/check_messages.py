"""What a checker asks the process that compiles constraints, and what that answers: frames over a pipe."""

from __future__ import annotations

import struct
from typing import IO

import msgspec

from quire.structured_output.params import StructuredOutputsParams

SIZE = struct.Struct("<I")


class Question(msgspec.Struct, array_like=True, frozen=True):
    """Whether a settled constraint compiles."""

    params: StructuredOutputsParams
    special: tuple[str, ...]
    backend: str
    timeout_s: float
    memory_mb: int


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The constraint as it is to be compiled; None, and why not, by a whole message if another `field` is to blame."""

    params: StructuredOutputsParams | None = None
    error: str = ""
    field: str = ""


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the stream."""
    head = stream.read(SIZE.size)
    return stream.read(SIZE.unpack(head)[0]) if len(head) == SIZE.size else None


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    stream.write(SIZE.pack(len(frame)) + frame)
    stream.flush()
