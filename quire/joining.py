# SPDX-License-Identifier: Apache-2.0
"""TCP handshake by which a process of another host joins: it sends a hello and is accepted or refused with a reason.

Invariant: a stranger's data is read with a limit of bytes and of seconds, and blocks nobody else.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

from quire.errors import StartupError

Hello = TypeVar("Hello", bound=msgspec.Struct)
Place = tuple[str, int]  # (address, port)

HELLO_S = 5.0
RETRY_S = 0.2
MAX_HELLO_BYTES = 1 << 16
_LENGTH = struct.Struct("!i")
SILENCE_S = 5  # Seconds of TCP silence after which a host is considered gone.


def listening(place: Place, options: str) -> socket.socket:
    """Return a listening socket for joining hosts; `options` name the flags for the error message.

    Raises:
        StartupError: the port is taken, as by another engine, or the address is none of this host.
    """
    try:
        family = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(place, family=family)
    except OSError as error:
        raise StartupError(
            f"hosts cannot join at {place[0]}:{place[1]}: {error}; {options} must be an address of this host and a "
            "free port, not used by another engine"
        ) from error


def receive_hello(connection: socket.socket, kind: type[Hello]) -> Hello | None:
    """Return the peer's hello; None if it is malformed or too late."""
    try:
        return msgspec.msgpack.decode(_frame(with_keepalive(connection), HELLO_S), type=kind)
    except (EOFError, OSError, msgspec.DecodeError):
        return None


def send_answer(connection: socket.socket, problem: str) -> bool:
    """Send the reason of a refusal, or an empty one to accept; returns whether it was sent."""
    try:
        with Connection(os.dup(connection.fileno())) as channel:
            channel.send_bytes(problem.encode())
    except OSError:
        return False
    return True


def connect_to_first_host(
    place: Place, who: str, join_s: float, stopped: threading.Event | None = None
) -> socket.socket | None:
    """Connect to a host that may start later; None if `stopped` was set before.

    Raises:
        StartupError: no connection within `join_s`; names the waiting process.
    """
    until, stopped = time.monotonic() + join_s, stopped or threading.Event()
    while not stopped.is_set():
        try:
            return with_keepalive(socket.create_connection(place, timeout=HELLO_S))
        except OSError as error:
            if time.monotonic() > until:
                raise StartupError(
                    f"{who} has waited {join_s:g} s for the first host, at {place[0]}:{place[1]}: {error}"
                ) from error
            stopped.wait(RETRY_S)
    return None


def introduce(connection: socket.socket, hello: msgspec.Struct, place: Place) -> socket.socket:
    """Send the hello; returns the connection once accepted.

    Raises:
        StartupError: refused; has the reason.
    """
    where = f"{place[0]}:{place[1]}"
    try:
        with Connection(os.dup(connection.fileno())) as channel:
            channel.send_bytes(msgspec.msgpack.encode(hello))
        problem = _frame(connection, HELLO_S * 2).decode()
    except (EOFError, OSError, UnicodeDecodeError) as error:
        connection.close()
        raise StartupError(
            f"the first host, at {where}, does not answer ({error!r}): is it quire?"
        ) from error
    if problem:
        connection.close()
        raise StartupError(f"the first host, at {where}, refuses this host: {problem}")
    return connection


def with_keepalive(connection: socket.socket) -> socket.socket:
    """Set keep-alive options so that a connection fails within seconds after the other host is lost."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_KEEPIDLE": 2,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": SILENCE_S - 2,
        "TCP_USER_TIMEOUT": SILENCE_S * 1000,
    }
    for name, value in wanted.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _frame(connection: socket.socket, seconds: float) -> bytes:
    """Read a frame, as `multiprocessing.connection` writes it, within `seconds`.

    Raises:
        OSError: it is late or too long. EOFError: the other end is closed.
    """
    until = time.monotonic() + seconds
    try:
        (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, until))
        if not 0 <= length <= MAX_HELLO_BYTES:
            raise OSError(f"a frame of {length} bytes")
        return _exactly(connection, length, until)
    finally:
        connection.settimeout(None)


def _exactly(connection: socket.socket, num_bytes: int, until: float) -> bytes:
    came = bytearray()
    while len(came) < num_bytes:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        part = connection.recv(num_bytes - len(came))
        if not part:
            raise EOFError
        came += part
    return bytes(came)
