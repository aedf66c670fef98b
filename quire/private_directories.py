"""Private directories in the temporary folder, in which processes of one engine find each other.

Invariant: each is removed by whoever made it, or by a process that outlives that one and has it, too. If all of these
were killed at once, whoever makes the next one removes it: its lock is free then. Nothing is removed so that has no
lock of this host's, or another user's.
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
_locks: dict[Path, int] = {}
"""Of this process's directories, held until these are removed or it ends; children do not inherit them."""


def make(kind: str = "") -> Path:
    """A new directory that only this user can read, and none is left of processes that are gone.

    Raises:
        OSError: the machine refuses it.
    """
    _forget_removed()
    _remove_left_over()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX + kind))
    try:
        _lock(directory)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory


def remove(directory: Path) -> None:
    """With all that is in it; twice is fine, and so is another process's."""
    shutil.rmtree(directory, ignore_errors=True)
    fd = _locks.pop(directory, None)
    if fd is not None:
        os.close(fd)


def _lock(directory: Path) -> None:
    """On a file system without locks there is none, and nobody will take the directory for left over."""
    lock = directory / f"new {_lock_name()}"
    fd = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.rename(directory / _lock_name())  # whoever sees it sees it locked
    except OSError:
        os.close(fd)
    else:
        _locks[directory] = fd


def _forget_removed() -> None:
    """Those that another process has removed."""
    for directory in list(_locks):
        if not directory.exists():
            remove(directory)


def _remove_left_over() -> None:
    for directory in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):  # it is another user's, in use, or gone by now
            if directory.stat().st_uid != os.getuid():
                continue
            fd = os.open(directory / _lock_name(), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(fd)


def _lock_name() -> str:
    """Locks may not reach other hosts that have the same folder."""
    return f"lock of {socket.gethostname()}"
