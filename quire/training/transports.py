# SPDX-License-Identifier: Apache-2.0
"""Transports of new weights: a named segment of shared memory, or a connection to a trainer's address.

Tensors lie one behind the other. A segment is read, never mapped, so that a trainer that truncates or removes it costs
its update and not the process; its name is no path, so it cannot leave the folder of segments. An address is one that
the operator has allowed. Per update the trainer sends the number of bytes (8, little-endian), then the tensors.
Invariant: no more is read than the update's tensors take, and each read ends within a bounded time.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.errors import UnavailableError, ValidationError
from quire.training.staging import Fill

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"/?([A-Za-z0-9_-][A-Za-z0-9_.-]{0,127})")


@contextmanager
def open_segment(name: Any, num_bytes: int, folder: Path = FOLDER) -> Iterator[Fill]:
    """Open a segment of at least `num_bytes` bytes; the value reads it from its start.

    Raises:
        ValidationError: there is no such segment, or it is smaller.
    """
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise _wrong(f"{name!r:.80} is no name of a segment: letters, digits, '_', '-' and '.' are allowed")
    try:
        fd = os.open(folder / found[1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _wrong(f"{found[1]!r} cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _wrong(f"{found[1]!r} is no segment of shared memory")
        if status.st_size < num_bytes:
            raise _wrong(f"{found[1]!r} has {status.st_size} bytes; the tensors take {num_bytes}")
        yield _reader(fd, found[1])
    finally:
        os.close(fd)


def _reader(fd: int, name: str) -> Fill:
    position = 0

    def fill(memory: memoryview) -> None:
        nonlocal position
        while len(memory):
            count = os.preadv(fd, [memory], position)
            if count == 0:
                raise _wrong(f"{name!r} ends at byte {position}: it was truncated meanwhile")
            position, memory = position + count, memory[count:]

    return fill


def _wrong(problem: str) -> ValidationError:
    return ValidationError(f"segment {problem}", param="update_info")


GREETING = b"quire-weights 1\n"
"""First bytes of this side, so that a trainer detects another program."""
PREFIX_BYTES = 8
SILENCE_S = 60.0


class WeightStream:
    """Connection to a trainer.

    Raises:
        UnavailableError: the trainer does not accept it.
    """

    def __init__(self, host: str, port: int, silence_s: float = SILENCE_S) -> None:
        self.address = f"{host}:{port}"
        try:
            self._socket = socket.create_connection((host, port), timeout=silence_s)
            self._socket.sendall(GREETING)
        except OSError as error:
            raise UnavailableError(
                f"the trainer at {self.address} cannot be reached: {error.strerror or error}"
            ) from None

    def expect(self, num_bytes: int) -> None:
        """Read the beginning of an update, whose tensors take this many bytes.

        Raises:
            ValidationError: the trainer has another number, or has ended.
        """
        prefix = bytearray(PREFIX_BYTES)
        self.fill(memoryview(prefix))
        given = int.from_bytes(prefix, "little")
        if given != num_bytes:
            raise self._wrong(f"announces {given} bytes; the tensors take {num_bytes}")

    def fill(self, memory: memoryview) -> None:
        """Fill memory with the next bytes.

        Raises:
            ValidationError: the trainer has ended, or is silent for too long.
        """
        while len(memory):
            try:
                count = self._socket.recv_into(memory)
            except OSError as error:
                raise self._wrong(f"stopped sending: {error.strerror or error}") from None
            if count == 0:
                raise self._wrong("has closed the connection")
            memory = memory[count:]

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._socket.close()

    def _wrong(self, problem: str) -> ValidationError:
        return ValidationError(f"the trainer at {self.address} {problem}", param="update_info")


def read_address(text: Any, allowed: Sequence[str] | None) -> tuple[str, int]:
    """Return host and port of "host:port".

    Args:
        allowed: addresses that the operator allows; None: all, for programs.

    Raises:
        ValidationError: the address is malformed or not allowed.
    """
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValidationError(f"address {text!r:.100} is not of the form host:port", param="init_info")
    if allowed is not None and text not in allowed:
        these = ", ".join(allowed) or "none; the operator allows some with --weight-transfer-addresses"
        raise ValidationError(f"address {text!r:.100} is not allowed; allowed: {these}", param="init_info")
    return host.strip("[]"), int(port)
