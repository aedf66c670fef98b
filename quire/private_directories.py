# SPDX-License-Identifier: Apache-2.0
"""Private directories in the temporary folder, in which processes of one engine find each other.

Invariant: each is removed by its creator, or by another process that uses it and outlives the creator. If all were
killed at once, the creator of the next one removes it, because its lock is free. A directory without a lock of this
host, or of another user, is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

PREFIX = "quire-"
# Locks of this process's directories, held until they are removed or it ends; not inherited.
_locks: dict[Path, int] = {}


def make(kind: str = "") -> Path:
    """Create a directory that only this user can read, and remove those of dead processes.

    Raises:
        OSError: the machine refuses it.
    """
    _release_removed()
    _remove_left_over()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX + kind))
    try:
        _lock(directory)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory


def remove(directory: Path) -> None:
    """Remove a directory with its content; may be called twice, and by other processes."""
    shutil.rmtree(directory, ignore_errors=True)
    fd = _locks.pop(directory, None)
    if fd is not None:
        os.close(fd)


def _lock(directory: Path) -> None:
    """Lock a directory; on a file system without locks it is never removed as left over."""
    lock = directory / f"new {_lock_name()}"
    fd = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.rename(directory / _lock_name())  # visible only when locked
    except OSError:
        os.close(fd)
    else:
        _locks[directory] = fd


def _release_removed() -> None:
    """Release locks of directories that another process has removed."""
    for directory in list(_locks):
        if not directory.exists():
            remove(directory)


def _remove_left_over() -> None:
    for directory in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):  # another user's, in use, or gone by now
            if directory.stat().st_uid != os.getuid():
                continue
            fd = os.open(directory / _lock_name(), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(fd)


def _lock_name() -> str:
    """Return the host's lock file name: locks may not reach other hosts that share the folder."""
    return f"lock of {socket.gethostname()}"
