# SPDX-License-Identifier: Apache-2.0
"""Row store of a peer: rows in the memory or on the disk of a row server, over a Unix socket or TCP.

Rows travel unencrypted: use it on a trusted network only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from quire.errors import ConfigError
from quire.kv_store import protocol
from quire.kv_store.protocol import (
    CHECKSUM,
    HEADER,
    MAX_NAMES,
    Address,
    Link,
    ProtocolError,
    ReplyKind,
    RequestKind,
)
from quire.kv_store.row_store import Namespace, Row, RowStoreError, RowStoreStats

_REQUESTS_IN_FLIGHT = 3  # The server reads the next rows while the client verifies these.
_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("@ll")
Answer = TypeVar("Answer")


class PeerStore:
    """`RowStore` with a row server. It connects when first used, and again after every failure.

    A call of more rows than the server takes in a request is several calls of the server's store: reads from the tail
    on, so that heads are used last, writes from the head on. Rows that the server evicts are not reported.

    Args:
        address: `unix:/PATH` or `tcp://HOST:PORT`.
        key: at least 16 random bytes that the server has as well; required if other machines can reach the address.
        connect_s: limit of a connection attempt and of its handshake, in seconds each.
        answer_s: limit of a call, in seconds, beside the time for its rows.
        bytes_per_s: lowest acceptable rate of rows.

    Raises:
        ConfigError: the address is malformed, or the key is missing or too short.
    """

    finds_at_once = False
    medium = "PEER"
    is_writable = True

    def __init__(
        self,
        address: str,
        namespace: Namespace,
        key: bytes | None = None,
        *,
        connect_s: float = 2.0,
        answer_s: float = 5.0,
        bytes_per_s: float = 20e6,
    ) -> None:
        self._address = protocol.parse_address(address)
        self._key = self._address.check_key(key)
        if not self._address.path and self._address.port == 0:
            raise ConfigError(f"{address!r} names no port; give the one on which the row server listens")
        self._namespace, self._seed = namespace, protocol.checksum_seed(namespace)
        self._connect_s, self._answer_s, self._bytes_per_s = connect_s, answer_s, bytes_per_s
        self._link: Link | None = None
        self._rows_per_request = 0
        self._last_id = 0
        self._num_corrupt = 0
        self._removed: list[bytes] = []

    def find(self, names: Sequence[bytes]) -> list[bool]:
        with self._connected(num_rows=0) as link:

            def receive(request_id: int, batch: slice) -> list[bool]:
                self._receive_header(link, ReplyKind.FLAGS, request_id, len(names[batch]))
                return protocol.receive_flags(link, len(names[batch]))

            batches = _batches(len(names), MAX_NAMES)
            found = self._pipelined(
                batches, lambda batch: self._request(link, RequestKind.FIND, names[batch]), receive
            )
            return [flag for flags in found for flag in flags]

    def read(self, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        damaged: list[bytes] = []
        with self._connected(len(names)) as link:

            def receive(request_id: int, batch: slice) -> list[bool]:
                return self._receive_rows(link, request_id, names[batch], rows[batch], damaged)

            batches = _batches(len(names), self._rows_per_request)[::-1]
            read = self._pipelined(
                batches, lambda batch: self._request(link, RequestKind.READ, names[batch]), receive
            )
        if damaged:
            self._num_corrupt += len(damaged)
            self.remove(damaged)
        return [flag for flags in read[::-1] for flag in flags]

    def write(self, names: Sequence[bytes], rows: Sequence[Row]) -> int:
        with self._connected(len(names)) as link:

            def send(batch: slice) -> int:
                request_id = self._request(link, RequestKind.WRITE, names[batch])
                for name, row in zip(names[batch], rows[batch], strict=True):
                    self._check_size(row)
                    link.send(CHECKSUM.pack(protocol.checksum(self._seed, name, row)), *row)
                return request_id

            def receive(request_id: int, batch: slice) -> int:
                return self._receive_header(
                    link, ReplyKind.DONE, request_id, len(names[batch]), is_limit=True
                )

            return sum(self._pipelined(_batches(len(names), self._rows_per_request), send, receive))

    def touch(self, names: Sequence[bytes]) -> None:
        self._send_names(RequestKind.TOUCH, names)

    def remove(self, names: Sequence[bytes]) -> None:
        self._send_names(RequestKind.REMOVE, names)
        self._removed += names

    def _send_names(self, kind: RequestKind, names: Sequence[bytes]) -> None:
        """Send names alone; tails first, so that heads are used last."""
        with self._connected(num_rows=0) as link:

            def receive(request_id: int, batch: slice) -> int:
                return self._receive_header(link, ReplyKind.DONE, request_id, len(names[batch]))

            batches = _batches(len(names), MAX_NAMES)[::-1]
            self._pipelined(batches, lambda batch: self._request(link, kind, names[batch]), receive)

    def names(self) -> list[bytes]:
        """Return nothing: other engines change them too."""
        return []

    def pop_removed(self) -> list[bytes]:
        """Return names of rows that this client has removed since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def stats(self) -> RowStoreStats:
        """Return the number of rows that arrived damaged; the size of the server's store is not known."""
        return RowStoreStats(num_corrupt=self._num_corrupt)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    @contextlib.contextmanager
    def _connected(self, num_rows: int) -> Iterator[Link]:
        """Yield the connection for one call; after an error it is dropped, so that no late reply is ever read."""
        try:
            if self._link is None or not self._link.is_quiet():  # the server was restarted, or speaks unasked
                self.close()
                self._link = self._connect()
            self._link.set_deadline(self._answer_s + num_rows * self._namespace.row_bytes / self._bytes_per_s)
            yield self._link
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | ProtocolError):
                raise RowStoreError(f"the row server at {self._address} does not work: {error}") from error
            raise

    def _connect(self) -> Link:
        link = Link(_connect(self._address, self._connect_s, needs_own_user=not self._key))
        try:
            link.set_deadline(self._connect_s)
            self._rows_per_request = protocol.begin(link, self._key, self._namespace)
        except BaseException:
            link.close()
            raise
        return link

    def _pipelined(
        self,
        batches: Sequence[slice],
        send: Callable[[slice], int],
        receive: Callable[[int, slice], Answer],
    ) -> list[Answer]:
        """Send requests a few ahead of their replies; returns the replies in the order of `batches`."""
        waiting: deque[tuple[int, slice]] = deque()
        answers = []
        for batch in batches:
            if len(waiting) == _REQUESTS_IN_FLIGHT:
                answers.append(receive(*waiting.popleft()))
            waiting.append((send(batch), batch))
        return answers + [receive(*request) for request in waiting]

    def _request(self, link: Link, kind: RequestKind, names: Sequence[bytes]) -> int:
        """Send a request, for WRITE all but its rows; returns its id."""
        self._last_id += 1
        link.send(HEADER.pack(kind, self._last_id, len(names)), b"".join(names))
        return self._last_id

    def _receive_header(
        self, link: Link, expected: ReplyKind, request_id: int, number: int, *, is_limit: bool = False
    ) -> int:
        """Return the number in a reply's header, which is `number`, or at most that.

        Raises:
            ProtocolError: it is another one, belongs to another request, or is an error; has the reason.
        """
        kind, answered, got = HEADER.unpack(link.receive(HEADER.size))
        if answered != request_id:
            raise ProtocolError(f"it answers request {answered}, and request {request_id} is expected")
        if kind == ReplyKind.ERROR:
            raise ProtocolError(protocol.receive_message(link, got))
        if kind != expected or got > number or (got < number and not is_limit):
            raise ProtocolError(
                f"it answers with kind {kind} and {got} rows; {expected} and {number} are expected"
            )
        return int(got)

    def _receive_rows(
        self, link: Link, request_id: int, names: Sequence[bytes], rows: Sequence[Row], damaged: list[bytes]
    ) -> list[bool]:
        """Fill the rows that were found, and return which are correct; `damaged` gets the names of the others."""
        self._receive_header(link, ReplyKind.ROWS, request_id, len(names))
        flags = protocol.receive_flags(link, len(names))
        stored = bytearray(CHECKSUM.size)
        for index in [index for index, flag in enumerate(flags) if flag]:
            name, row = names[index], rows[index]
            self._check_size(row)
            link.receive_into([memoryview(stored), *row])
            if CHECKSUM.unpack(stored) != (protocol.checksum(self._seed, name, row),):
                flags[index] = False
                damaged.append(name)
        return flags

    def _check_size(self, row: Row) -> None:
        assert sum(map(len, row)) == self._namespace.row_bytes, "a row of another namespace"


def _batches(num_rows: int, rows_per_batch: int) -> list[slice]:
    return [slice(start, start + rows_per_batch) for start in range(0, num_rows, rows_per_batch)]


def _connect(address: Address, connect_s: float, needs_own_user: bool) -> socket.socket:
    """Connect to a server; without a key, that of a Unix socket must be of this user or of root.

    Raises:
        OSError: the connection failed. ProtocolError: the server is of another user.
    """
    if not address.path:
        return socket.create_connection((address.host, address.port), connect_s)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Unlike `settimeout`, this waits for a server that is too busy to accept.
        limit = _TIMEVAL.pack(int(connect_s), int(connect_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.connect(address.path)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = _CREDENTIALS.unpack(credentials)[1]
        if needs_own_user and user not in (os.getuid(), 0):
            raise ProtocolError(f"it belongs to user {user}; use a server of user {os.getuid()}, or a key")
    except BaseException:
        connection.close()
        raise
    return connection
