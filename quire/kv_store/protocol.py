# SPDX-License-Identifier: Apache-2.0
"""Protocol between clients and servers of KV cache rows: addresses, handshake, frames, checksums.

All integers are big-endian. After the handshake the client sends requests, which the server answers in order:

    request: kind, id, number of names; names; WRITE: the rows
    reply:   kind, id, number; FLAGS, ROWS: a flag per name; ROWS: the rows found; ERROR: that many bytes of UTF-8

A row travels as its checksum and its content, and servers store it so: the reader verifies what the writer computed.
Handshake: both prove by HMAC-SHA256 over two random challenges that they have the same key, which is empty without
one. Nothing but the proof is secret: names and rows travel unencrypted, so the network must be a trusted one.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from quire.errors import ConfigError
from quire.joining import with_keepalive
from quire.kv_store.row_store import NAME_BYTES, Namespace, Row, RowStoreError

VERSION = 1
MAGIC = b"quirerow"
MAX_NAMES = 4096
MAX_NAMESPACE_BYTES = 1 << 16
MAX_MESSAGE_BYTES = 1000
MIN_KEY_BYTES = 16
MAX_PATH_BYTES = 107
CHECKSUM = struct.Struct("!I")
HEADER = struct.Struct("!BQI")  # Kind, id, number.
_HELLO = struct.Struct("!8sI32s")  # Magic, version, challenge. No later version may change it.
_LENGTH = struct.Struct("!I")
_ANSWER = struct.Struct("!II")  # Rows per request; length of the reason of a refusal.
_CHALLENGE_BYTES = _PROOF_BYTES = 32
_VIEWS_PER_CALL = 64  # More cost more than they save: each call visits all of its views.


class ProtocolError(RowStoreError):
    """Peer that sends what the protocol does not allow; its connection is of no use any more."""


class RequestKind(enum.IntEnum):
    """Kinds of requests."""

    FIND = 1
    READ = 2
    WRITE = 3
    REMOVE = 4
    TOUCH = 5


class ReplyKind(enum.IntEnum):
    """Kinds of replies."""

    FLAGS = 17
    ROWS = 18
    DONE = 19
    ERROR = 20


class Address(NamedTuple):
    """Place of a row server: the path of a Unix socket, or a host and a port of TCP."""

    path: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix:{self.path}" if self.path else f"tcp://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Only processes of this machine can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False

    def check_key(self, key: bytes | None) -> bytes:
        """Return the key for the handshake.

        Raises:
            ConfigError: it is too short, or there is none and other machines can reach the address.
        """
        if key is None and not self.is_local:
            raise ConfigError(
                f"other machines can reach {self}, and there is no key; give both sides the same one "
                "(--kv-store-key-file) or use unix:/PATH or an address of this machine only, such as "
                "tcp://127.0.0.1:PORT"
            )
        if key is not None and len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"the key of the row server at {self} has {len(key)} bytes; give {MIN_KEY_BYTES} or more, at random"
            )
        return key or b""


def parse_address(text: str) -> Address:
    """Return the address that `unix:/PATH` or `tcp://HOST:PORT` states; an IPv6 host is in brackets.

    Raises:
        ConfigError: it is neither, or the path is too long for a socket.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("/") and len(os.fsencode(path)) <= MAX_PATH_BYTES and "\0" not in path:
            return Address(path, "", 0)
    elif text.startswith("tcp://"):
        with contextlib.suppress(ValueError):  # a port or brackets that are none: refused below
            parts = urlsplit(text)
            is_plain = parts.netloc == text.removeprefix("tcp://") and "@" not in parts.netloc
            if parts.hostname and parts.port is not None and is_plain:
                return Address("", parts.hostname, parts.port)
    raise ConfigError(
        f"{text!r} is no address of a row server; give unix:/PATH (an absolute path of at most {MAX_PATH_BYTES} "
        "bytes) or tcp://HOST:PORT (an IPv6 address in brackets)"
    )


class Link:
    """Connected socket and the deadline of what is sent and received now.

    Raises:
        OSError: from every method that sends or receives: closed, broken, or later than the deadline.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._until = 0.0

    def set_options(self) -> None:
        """Send small frames at once, and notice a lost peer."""
        if self._socket.family != socket.AF_UNIX:
            with_keepalive(self._socket)

    def set_deadline(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def is_quiet(self) -> bool:
        """Return whether the connection is open and nothing waits to be received."""
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def wait(self) -> bool:
        """Wait without a deadline until something can be received; False if the peer closed instead."""
        self._socket.settimeout(None)
        return bool(self._socket.recv(1, socket.MSG_PEEK))

    def receive(self, num_bytes: int) -> bytes:
        """Return exactly that many bytes."""
        content = bytearray(num_bytes)
        self.receive_into([memoryview(content)])
        return bytes(content)

    def receive_into(self, views: Iterable[memoryview]) -> None:
        """Fill views of bytes, in order."""
        rest = _Rest(views)
        while now := rest.views():
            num_bytes = self._within_deadline().recvmsg_into(now)[0]
            if num_bytes == 0:
                raise ConnectionError("the peer closed the connection")
            rest.advance(num_bytes)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all of some bytes, in order."""
        rest = _Rest(map(memoryview, parts))
        while now := rest.views():
            rest.advance(self._within_deadline().sendmsg(now))

    def shut_down(self) -> None:
        """End sending and receiving, also of a thread that waits in either."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _within_deadline(self) -> socket.socket:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer is later than its deadline")
        self._socket.settimeout(left)
        return self._socket


class _Rest:
    """Views of which some bytes are done."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._start = 0

    def views(self) -> list[memoryview]:
        return self._views[self._start : self._start + _VIEWS_PER_CALL]

    def advance(self, num_bytes: int) -> None:
        while num_bytes:
            first = self._views[self._start]
            if num_bytes < len(first):
                self._views[self._start] = first[num_bytes:]
                return
            num_bytes -= len(first)
            self._start += 1


def begin(link: Link, key: bytes, namespace: Namespace) -> int:
    """Handshake of the client; returns how many rows a request may have.

    Raises:
        ProtocolError: the peer is no row server of this version, has another key, or refuses; has the reason.
        OSError: the connection failed.
    """
    own, other = _exchange_challenges(link)
    _check_proof(link.receive(_PROOF_BYTES), _prove(key, b"server", own, other))
    content = msgspec.msgpack.encode(namespace)
    link.send(_prove(key, b"client", own, other, content), _LENGTH.pack(len(content)), content)
    rows_per_request, num_bytes = _ANSWER.unpack(link.receive(_ANSWER.size))
    if num_bytes:
        raise ProtocolError(f"it refuses this engine: {receive_message(link, num_bytes)}")
    if not 1 <= rows_per_request <= MAX_NAMES:
        raise ProtocolError(f"it allows {rows_per_request} rows in a request; valid are 1 to {MAX_NAMES}")
    return int(rows_per_request)


def answer(link: Link, key: bytes) -> Namespace:
    """Handshake of the server, up to its `accept` or `refuse`; returns the namespace of the client.

    Raises:
        ProtocolError: the peer is no client of this version, or has another key; has the reason.
        OSError: the connection failed.
    """
    own, other = _exchange_challenges(link)
    link.send(_prove(key, b"server", other, own))
    proof, (num_bytes,) = link.receive(_PROOF_BYTES), _LENGTH.unpack(link.receive(_LENGTH.size))
    if num_bytes > MAX_NAMESPACE_BYTES:
        raise ProtocolError(f"its namespace has {num_bytes} bytes; {MAX_NAMESPACE_BYTES} are allowed")
    content = link.receive(num_bytes)
    _check_proof(proof, _prove(key, b"client", other, own, content))
    try:
        return msgspec.msgpack.decode(content, type=Namespace)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"its namespace is malformed: {error}") from error


def accept(link: Link, rows_per_request: int) -> None:
    """End the handshake of the server."""
    link.send(_ANSWER.pack(rows_per_request, 0))


def refuse(link: Link, reason: str) -> None:
    """End the handshake of the server, and with it the connection."""
    message = _message(reason)
    link.send(_ANSWER.pack(0, len(message)), message)


def send_error(link: Link, request_id: int, reason: str) -> None:
    """Reply that the store does not work."""
    message = _message(reason)
    link.send(HEADER.pack(ReplyKind.ERROR, request_id, len(message)), message)


def receive_message(link: Link, num_bytes: int) -> str:
    """Return a text for the operator.

    Raises:
        ProtocolError: it is too long. OSError: the connection failed.
    """
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"its message has {num_bytes} bytes; {MAX_MESSAGE_BYTES} are allowed")
    return link.receive(num_bytes).decode(errors="replace")


def receive_names(link: Link, num_names: int) -> list[bytes]:
    """Return the names of a request.

    Raises:
        ProtocolError: they are too many, or some are the same. OSError: the connection failed.
    """
    if not 1 <= num_names <= MAX_NAMES:
        raise ProtocolError(f"a request has {num_names} names; valid are 1 to {MAX_NAMES}")
    content = link.receive(num_names * NAME_BYTES)
    names = [content[start : start + NAME_BYTES] for start in range(0, len(content), NAME_BYTES)]
    if len(set(names)) < num_names:
        raise ProtocolError("a request has a name twice")
    return names


def receive_flags(link: Link, num_names: int) -> list[bool]:
    """Return a flag for each name of a request.

    Raises:
        ProtocolError: a byte is no flag. OSError: the connection failed.
    """
    content = link.receive(num_names)
    if content.strip(b"\0\1"):
        raise ProtocolError("a reply has a flag that is neither 0 nor 1")
    return [flag == 1 for flag in content]


def sent_namespace(namespace: Namespace) -> Namespace:
    """Return the namespace of rows as they are sent and as servers store them: each with its checksum."""
    values = {**namespace.values, "peer_rows": f"CRC-32, protocol {VERSION}"}
    return Namespace(values, CHECKSUM.size + namespace.row_bytes)


def checksum(seed: int, name: bytes, row: Row) -> int:
    """Return the CRC-32 of a name and its row; `seed` is the one of the namespace."""
    crc = zlib.crc32(name, seed)
    for part in row:
        crc = zlib.crc32(part, crc)
    return crc


def checksum_seed(namespace: Namespace) -> int:
    """Return the CRC-32 with which the checksums of a namespace begin."""
    return zlib.crc32(namespace.digest.encode())


def _exchange_challenges(link: Link) -> tuple[bytes, bytes]:
    """Send and receive a hello; returns both challenges, the own one first."""
    link.set_options()
    own = secrets.token_bytes(_CHALLENGE_BYTES)
    link.send(_HELLO.pack(MAGIC, VERSION, own))
    magic, version, other = _HELLO.unpack(link.receive(_HELLO.size))
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak the protocol of row stores: is it quire?")
    if version != VERSION:
        raise ProtocolError(
            f"it has protocol version {version}, and this quire {VERSION}; update the older one"
        )
    return own, other


def _prove(key: bytes, role: bytes, client: bytes, server: bytes, content: bytes = b"") -> bytes:
    """Return what only a holder of the key can compute for two challenges; roles are of equal length."""
    hashed = hashlib.sha256(
        key
    ).digest()  # HMAC pads keys with zeros, so a key of zeros would be the empty one.
    return hmac.digest(hashed, MAGIC + role + client + server + content, "sha256")


def _check_proof(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise ProtocolError("it has another key; give both sides the same one (--kv-store-key-file)")


def _message(reason: str) -> bytes:
    """Return a text as it is sent; it may lose its end, also within a character."""
    return (reason or "no reason").encode(errors="replace")[:MAX_MESSAGE_BYTES]
