# SPDX-License-Identifier: Apache-2.0
"""Listening Unix sockets that belong to one user."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat

PROBE_S = 0.2


def listen_unix(path: str, backlog: int | None = None) -> socket.socket:
    """Listen at a path for this user only; a socket there at which nothing listens is replaced.

    Args:
        backlog: connections that may wait to be accepted; None: the system's default.

    Raises:
        OSError: the path is in use, is another file or too long, or its directory does not exist.
    """
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Another server may find the same old socket.
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o600)  # No client can connect before `listen`.
        listener.listen(*([] if backlog is None else [backlog]))
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(directory)
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that has ended.

    Raises:
        OSError: the path is in use, or another file.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "the path is a file that is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_S)
            probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
        return
    raise OSError(errno.EADDRINUSE, "a server listens there")
