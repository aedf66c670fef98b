# SPDX-License-Identifier: Apache-2.0
"""Directory of files that can be made again, bounded in bytes: the least recently used are evicted for new ones.

Invariant: a file appears whole, by renaming, and is this user's alone; several writers at once do no harm. A file that
is deleted while a process has it mapped stays that process's.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from pathlib import Path
from typing import BinaryIO

_DRAFT_BYTES = 4
"""Bytes of a random number in the name of an unfinished file."""
_KEY_DIGITS = 32
GIB = 2**30


def user_cache() -> Path | None:
    """Return the user's cache directory, by the XDG specification; None: no home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


class BoundedDirectory:
    """Files of one suffix, named "NAME.KEY.SUFFIX", in `path`; other files there are left alone.

    Args:
        limit: bytes of all files together.
    """

    def __init__(self, path: Path, suffix: str, limit: int) -> None:
        self.path = path
        self._suffix = suffix
        self._limit = limit

    def place(self, name: str, key: str) -> Path:
        """Return the path of the file of a key of hexadecimal digits, if there is one."""
        return self.path / f"{name}.{key[:_KEY_DIGITS]}.{self._suffix}"

    @contextmanager
    def new_file(self, place: Path, num_bytes: int) -> Iterator[BinaryIO]:
        """Yield a file of `num_bytes` to write, and move it to `place` when the block ends without an error.

        Raises:
            OSError: it cannot be written, or there is no room for it; nothing is left of it.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._clear_abandoned()
        self._make_room(place, num_bytes)
        draft = self.path / f".{place.name}.{secrets.token_hex(_DRAFT_BYTES)}"
        try:
            with draft.open("xb") as file:
                os.fchmod(file.fileno(), 0o600)
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
                file.flush()
                draft.rename(place)  # while it is locked, so that it is not deleted as abandoned
        finally:
            draft.unlink(missing_ok=True)

    def touch(self, place: Path) -> None:
        """Mark a file as just used; a directory that cannot be written has no order."""
        with suppress(OSError):
            os.utime(place)

    def _clear_abandoned(self) -> None:
        """Delete the unfinished files of killed writers, which are no longer locked."""
        for draft in self.path.glob(f".*.{self._suffix}.{'?' * 2 * _DRAFT_BYTES}"):
            with suppress(OSError), draft.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()

    def _make_room(self, place: Path, num_bytes: int) -> None:
        """Delete files until one of `num_bytes` keeps the limit.

        Raises:
            OSError: the file alone exceeds the limit, or would take more than half of the free disk space.
        """
        if num_bytes > self._limit:
            raise OSError(
                ENOSPC, f"{num_bytes / GIB:.1f} GiB are over the limit of {self._limit / GIB:.1f} GiB"
            )
        files = sorted(self._files(but=place))
        used = sum(size for _, size, _ in files)
        for _, size, path in files:
            if used + num_bytes <= self._limit:
                break
            path.unlink(missing_ok=True)
            used -= size
        free = shutil.disk_usage(self.path).free
        if free < 2 * num_bytes:
            raise OSError(
                ENOSPC, f"{num_bytes / GIB:.1f} GiB would take more than half of the free disk space"
            )

    def _files(self, but: Path) -> Iterator[tuple[int, int, Path]]:
        """Yield the time of the last use, bytes and path of each file except `but`."""
        for path in self.path.glob(f"*.{'[0-9a-f]' * _KEY_DIGITS}.{self._suffix}"):
            if path != but:
                with suppress(OSError):
                    status = path.stat()
                    yield status.st_mtime_ns, status.st_size, path
