# SPDX-License-Identifier: Apache-2.0
"""Private directories, whole transfers and locks, for files that hold conversations.

Invariant: directories have mode 0700 and files 0600 whatever the umask, and no symbolic link below the user's directory
is followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quire.errors import ConfigError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write that mean no more than a full disk or a used-up quota."""
NO_FILE = frozenset({errno.EPERM, errno.ELOOP, errno.ENXIO})
"""Errors of `open_file` if something else than a regular file of this user has the name."""
POLL_S = 0.001
IOV_MAX = os.sysconf("SC_IOV_MAX")
_PRIVATE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO in the place of a file must not block


def open_root(path: Path, *, create: bool) -> int:
    """Open the user's directory, which may be a link to one; returns its descriptor.

    Raises:
        ConfigError: it cannot be made or opened, is another user's, or others can write to it.
    """
    try:
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _make_directory(path, None)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"the directory {path} of KV cache rows cannot be opened: {error.strerror}; "
            "give a directory that this user can write to"
        ) from error
    return _checked(fd, str(path))


def open_directory(root: int, name: str, path: Path, *, create: bool) -> int:
    """Open directory `name` below `root` in the same way; `path` is for messages.

    Raises:
        ConfigError: see `open_root`; or it is a symbolic link.
    """
    try:
        if create and not _exists(root, name):
            _make_directory(name, root)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=root)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be opened as a directory of KV cache rows: {error.strerror}; "
            "remove it, or give another directory"
        ) from error
    return _checked(fd, str(path))


def open_file(directory: int, name: str, flags: int) -> int:
    """Open a regular file of this user in a directory, made with mode 0600 if `flags` has O_CREAT.

    Raises:
        OSError: as `os.open`; EPERM if it is no regular file of this user.
    """
    fd = os.open(name, flags | _PRIVATE, 0o600, dir_fd=directory)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise OSError(errno.EPERM, "not a regular file of this user", name)
    if flags & os.O_CREAT:
        os.fchmod(fd, 0o600)
    return fd


def transfer(
    move: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    num_bytes: int,
    offset: int,
) -> int:
    """Read or write buffers that have `num_bytes` together in whole, with `os.preadv` or `os.pwritev`.

    Returns:
        The number of bytes, which is smaller only where the file ends.

    Raises:
        OSError: as `move`.
    """
    num_moved = move(fd, buffers[:IOV_MAX], offset)
    while 0 < num_moved < num_bytes:
        moved = move(fd, _after(buffers, num_moved)[:IOV_MAX], offset + num_moved)
        if moved == 0:
            break
        num_moved += moved
    return num_moved


def _after(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return buffers without their first bytes."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []


def transfer_bytes(
    move: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    data: bytes | bytearray | memoryview,
    offset: int,
) -> int:
    """Do the same with one buffer."""
    return transfer(move, fd, [memoryview(data)], len(data), offset)


@contextmanager
def locked(fd: int) -> Iterator[None]:
    """Hold the lock of a descriptor, waiting for it."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def try_lock(fd: int) -> bool:
    """Take the lock of a descriptor if it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(fd: int, seconds: float) -> bool:
    """Take the lock of a descriptor, waiting for a bounded time; False if another process keeps it."""
    until = time.monotonic() + seconds
    while not try_lock(fd):
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def discard(directory: int, name: str) -> int:
    """Delete a file, and free its blocks though other processes have it open; returns its size.

    Raises:
        OSError: it cannot be deleted.
    """
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if stat.S_ISREG(status.st_mode):
        fd = open_file(directory, name, os.O_WRONLY)
        try:
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
    os.unlink(name, dir_fd=directory)
    return status.st_size


def _exists(root: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _make_directory(path: Path | str, root: int | None) -> None:
    try:
        os.mkdir(path, 0o700, dir_fd=root)
    except FileExistsError:  # another process was first
        return
    os.chmod(path, 0o700, dir_fd=root)


def _checked(fd: int, path: str) -> int:
    """Return the descriptor of a directory that only this user can write to; closes others.

    Raises:
        ConfigError: it is another.
    """
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        fault = (
            f"belongs to user {status.st_uid}, and this is user {os.geteuid()}; give a directory of this user"
        )
    elif status.st_mode & 0o022:
        fault = (
            f"has mode {stat.S_IMODE(status.st_mode):04o}, so others can write to it; run chmod 700 {path}"
        )
    else:
        return fd
    os.close(fd)
    raise ConfigError(f"the directory {path} of KV cache rows {fault}")
