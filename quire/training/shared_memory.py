# SPDX-License-Identifier: Apache-2.0
"""Tensors in a named segment of shared memory, one behind the other.

Invariant: a segment is read, never mapped, so that a trainer that truncates or removes it costs its update and not the
process. The name is no path: it cannot leave the folder of segments.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.errors import ValidationError
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
