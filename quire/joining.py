"""How a process of another host joins one of this host by TCP: it says who it is, and is welcome or told why not.

Invariant: what comes from a stranger is read with a limit of bytes and of seconds, and costs nobody else anything.
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
Place = tuple[str, int]
"""Address and port."""

HELLO_S = 5.0
RETRY_S = 0.2
MOST_HELLO_BYTES = 1 << 16
_LENGTH = struct.Struct("!i")
SILENCE_S = 5
"""A host that is silent for so long, though its system would answer, is gone."""


def listening(place: Place, options: str) -> socket.socket:
    """A socket at which others join; `options` say where, for the operator.

    Raises:
        StartupError: the port is taken, as by another engine, or the address is none of this host.
    """
    try:
        family = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(place, family=family)
    except OSError as error:
        raise StartupError(
            f"hosts cannot join at {place[0]}:{place[1]}: {error}; {options} must be an address of this host and a "
            "port that is free, also of other engines"
        ) from error


def heard(guest: socket.socket, kind: type[Hello]) -> Hello | None:
    """What a connection says of itself, if that is a word of ours and all of it comes in time."""
    try:
        return msgspec.msgpack.decode(_frame(watched(guest), HELLO_S), type=kind)
    except (EOFError, OSError, msgspec.DecodeError):
        return None


def answered(guest: socket.socket, problem: str) -> bool:
    """Whether it has been told why it cannot join; empty: it can."""
    try:
        with Connection(os.dup(guest.fileno())) as connection:
            connection.send_bytes(problem.encode())
    except OSError:
        return False
    return True


def opened(
    place: Place, who: str, join_s: float, stopped: threading.Event | None = None
) -> socket.socket | None:
    """A connection to a host that may be yet to come; None if `stopped` was set before.

    Raises:
        StartupError: there is none within `join_s`; says who has waited.
    """
    until, stopped = time.monotonic() + join_s, stopped or threading.Event()
    while not stopped.is_set():
        try:
            return watched(socket.create_connection(place, timeout=HELLO_S))
        except OSError as error:
            if time.monotonic() > until:
                raise StartupError(
                    f"{who} has waited {join_s:g} s for the first host, at {place[0]}:{place[1]}: {error}"
                ) from error
            stopped.wait(RETRY_S)
    return None


def introduced(way: socket.socket, hello: msgspec.Struct, place: Place) -> socket.socket:
    """The same connection, once this process is welcome there.

    Raises:
        StartupError: it is not; the message says why.
    """
    where = f"{place[0]}:{place[1]}"
    try:
        with Connection(os.dup(way.fileno())) as connection:
            connection.send_bytes(msgspec.msgpack.encode(hello))
        problem = _frame(way, HELLO_S * 2).decode()
    except (EOFError, OSError, UnicodeDecodeError) as error:
        way.close()
        raise StartupError(
            f"the first host, at {where}, does not answer ({error!r}): is that quire?"
        ) from error
    if problem:
        way.close()
        raise StartupError(f"the first host, at {where}, refuses this one: {problem}")
    return way


def watched(way: socket.socket) -> socket.socket:
    """A connection that fails within seconds when the other host is gone without a word."""
    way.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    way.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_KEEPIDLE": 2,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": SILENCE_S - 2,
        "TCP_USER_TIMEOUT": SILENCE_S * 1000,
    }
    for name, value in wanted.items():
        if hasattr(socket, name):
            way.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return way


def _frame(way: socket.socket, seconds: float) -> bytes:
    """The next frame, as `multiprocessing.connection` writes one, if all of it comes in so many seconds.

    Raises:
        OSError: it is not there in time, or longer than what may be said. EOFError: the other end is closed.
    """
    until = time.monotonic() + seconds
    try:
        (length,) = _LENGTH.unpack(_exactly(way, _LENGTH.size, until))
        if not 0 <= length <= MOST_HELLO_BYTES:
            raise OSError(f"a frame of {length} bytes")
        return _exactly(way, length, until)
    finally:
        way.settimeout(None)


def _exactly(way: socket.socket, num_bytes: int, until: float) -> bytes:
    """However they are cut on their way."""
    came = bytearray()
    while len(came) < num_bytes:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        way.settimeout(left)
        part = way.recv(num_bytes - len(came))
        if not part:
            raise EOFError
        came += part
    return bytes(came)
