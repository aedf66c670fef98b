# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines that only grow by whole lines; complete lines are never lost.

Invariant: a line is complete once its newline is written. A last line without one, which a killed process or a full
disk left, is cut off when the file is opened again. Only one process writes a file at a time. What replaces a file is
written beside it, and takes its name once it is complete.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.errors import ConfigError, QuireError

logger = logging.getLogger(__name__)

SYNC_S = 5.0  # Seconds between two writes to the device; a power failure costs at most this time's answers.


def partial_of(path: Path) -> Path:
    """Return the file beside `path` that an unfinished run writes."""
    return path.with_name(f"{path.name}.partial")


class LineFile:
    """Open file of JSON lines, at its end.

    Args:
        file: unbuffered, or flushed by each write.
        path: its name; None for a stream, which cannot be cut.
        begin: first bytes of every line.
    """

    def __init__(
        self,
        file: BinaryIO | FileIO,
        path: Path | None = None,
        begin: bytes = b"{",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._file, self._begin, self._clock = file, begin, clock
        self._end = 0
        self._synced_at = clock()

    def append(self, record: Any) -> int:
        """Write a line, and return the offset of its first byte.

        Raises:
            QuireError: the line cannot be written; the file ends with the last complete line.
        """
        start = self._end
        text = memoryview(msgspec.json.encode(record) + b"\n")
        try:
            while text:
                written = self._file.write(text)
                self._end, text = self._end + written, text[written:]
            self._file.flush()
            if self._clock() - self._synced_at >= SYNC_S:
                self.sync()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._cut(start)
            raise QuireError(f"an answer cannot be written to {self._name}: {error.strerror}") from error
        return start

    def sync(self) -> None:
        """Write everything to the device."""
        self._synced_at = self._clock()
        if self.path is not None:
            os.fsync(self._file.fileno())

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the bytes of each line, and cut off an incomplete last one.

        Raises:
            ConfigError: the last line is incomplete, and is none of this file's kind.
        """
        assert self.path is not None
        end = number = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    if not self._begin.startswith(line[: len(self._begin)]):
                        raise self.foreign(number)
                    break
                yield end, line
                end += len(line)
        self._cut(end)

    def foreign(self, number: int) -> ConfigError:
        """Return the error of a line that is none of this file's kind."""
        return ConfigError(f"{self._name}: line {number} is no answer of a batch, so it is left as it is")

    @property
    def is_empty(self) -> bool:
        return self._end == 0

    @property
    def _name(self) -> str:
        return "standard output" if self.path is None else str(self.path)

    def _cut(self, end: int) -> None:
        if self.path is not None and os.path.isfile(self.path):
            os.ftruncate(self._file.fileno(), end)
            self._file.seek(end)
        self._end = end


@contextmanager
def opened_lines(path: Path, begin: bytes, *, anew: bool = False) -> Iterator[LineFile]:
    """Open a file of lines for this process only, and create it where there is none.

    Args:
        anew: drop the lines that it has.

    Raises:
        ConfigError: another process writes it.
        OSError: it cannot be opened.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
        lock(file, path)
        if anew:
            file.truncate()
        lines = LineFile(file, path, begin)
        try:
            yield lines
        finally:
            lines.sync()


def lock(file: FileIO, path: Path) -> None:
    """Keep other runs from a file until it is closed.

    Raises:
        ConfigError: another run has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path} is being written by another run") from None
    except OSError:
        return  # a file system without locks
    if not os.path.exists(path) or not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        raise ConfigError(f"{path} is being replaced by another run")


def drop_lines(path: Path, begin: bytes, is_dropped: Callable[[bytes], bool]) -> int:
    """Rewrite a file without some of its lines, and return how many were dropped.

    Raises:
        ConfigError: another process writes it, or it has lines of another kind.
    """
    num_dropped = 0
    with opened_lines(path, begin) as lines, replacement(path) as out:
        for number, (_, line) in enumerate(lines.read(), 1):
            try:
                dropped = is_dropped(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise lines.foreign(number) from None
            num_dropped += dropped
            if not dropped:
                out.write(line)
    return num_dropped


@contextmanager
def replacement(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` at the end; after an error `path` is as it was."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with open(beside, "xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        put_in_place(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def put_in_place(new: Path, path: Path) -> None:
    """Give a complete file the name of another, so that a power failure leaves one or the other."""
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
