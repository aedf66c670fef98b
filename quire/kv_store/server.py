# SPDX-License-Identifier: Apache-2.0
"""Row server: stores of KV cache rows, one per namespace, for many clients over a Unix socket or TCP.

Invariant: a client changes nothing but rows of its own namespace. One that is malformed, silent or slow loses its
connection, and others do not notice. All that clients can make the server hold is bounded by `RowServerLimits`.
Rows travel unencrypted: use it on a trusted network only.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import signal
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from quire.errors import QuireError, StartupError
from quire.kv_store import protocol
from quire.kv_store.protocol import HEADER, MAX_NAMES, Address, Link, ProtocolError, ReplyKind, RequestKind
from quire.kv_store.row_store import Namespace, OtherNamespaceError, RowStore, RowStoreError
from quire.unix_sockets import listen_unix

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
OpenStore = Callable[[Namespace], RowStore]


@dataclass(frozen=True)
class RowServerLimits:
    """Limits of a row server.

    Args:
        max_clients: connections; beyond, the oldest without a handshake is closed, or else the new one.
        num_buffers: requests with rows that are served at a time; others wait.
        buffer_bytes: largest request; also the largest row, with its checksum.
        hello_s: limit of a handshake, in seconds.
        answer_s: limit of a request, in seconds, beside the time for its rows.
        bytes_per_s: lowest acceptable rate of rows.
    """

    max_clients: int = 64
    num_buffers: int = 8
    buffer_bytes: int = 32 << 20
    hello_s: float = 5.0
    answer_s: float = 10.0
    bytes_per_s: float = 5e6


class RowServer:
    """Server of row stores; it listens as soon as it exists, and serves after `start`.

    Args:
        address: `unix:/PATH` or `tcp://HOST:PORT`; port 0: a free one.
        open_store: opens the store of a namespace, which the server closes. Rows in it have their checksum in front,
            and the namespace says so. It is called again if the namespace is needed again.
        key: at least 16 random bytes that clients have as well; required if other machines can reach the address.

    Raises:
        ConfigError: the address is malformed, or the key is missing or too short.
        StartupError: the address is in use or cannot be listened on.
    """

    def __init__(
        self,
        address: str,
        open_store: OpenStore,
        key: bytes | None = None,
        limits: RowServerLimits | None = None,
    ) -> None:
        self._limits = limits or RowServerLimits()
        wanted = protocol.parse_address(address)
        self._key = wanted.check_key(key)
        self._listener = _Listener(wanted)
        self.address = self._listener.address
        self._stores = _OpenStores(open_store, self._limits.max_clients)
        self._buffers: queue.LifoQueue[memoryview] = queue.LifoQueue()
        for _ in range(self._limits.num_buffers):  # Of no cost before their first use.
            self._buffers.put(memoryview(mmap.mmap(-1, self._limits.buffer_bytes)))
        self._lock = threading.Lock()
        self._clients: dict[_Client, threading.Thread] = {}  # Oldest first.
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, name="quire-row-server", daemon=True)

    def start(self) -> None:
        """Serve clients in threads until `close`."""
        logger.info("the row server listens at %s", self.address)
        self._acceptor.start()

    def close(self) -> None:
        """End all connections, wait for their threads and close the stores; may be called twice."""
        self._listener.stop()
        with self._lock:
            self._is_closed = True
            threads = list(self._clients.values())
            for client in self._clients:
                client.link.shut_down()
        for thread in [*threads, self._acceptor]:
            if thread.ident is not None:
                thread.join()
        self._listener.close()
        self._stores.close()

    def _accept(self) -> None:
        for number, (connection, peer) in enumerate(self._listener.connections(), start=1):
            client = _Client(Link(connection), f"row client {number}{f' at {peer}' * bool(peer)}")
            if not self._has_room():
                logger.warning("%s is refused: there are %d clients", client.name, self._limits.max_clients)
                connection.close()
            elif not self._start(client):
                connection.close()

    def _has_room(self) -> bool:
        """Return whether one more client may connect, if need be after removing one without a handshake."""
        with self._lock:
            if len(self._clients) < self._limits.max_clients:
                return True
            stranger = next((client for client in self._clients if not client.is_known), None)
            if stranger is None:
                return False
            stranger.link.shut_down()
            thread = self._clients[stranger]
        thread.join()
        return True

    def _start(self, client: _Client) -> bool:
        """Start the thread of a client; False if the server is being closed, or the machine has no room for threads."""
        thread = threading.Thread(target=self._run, args=(client,), name="quire-row-client", daemon=True)
        with self._lock:
            if self._is_closed:
                return False
            try:
                thread.start()
            except RuntimeError as error:
                logger.error("%s is refused: %s", client.name, error)
                return False
            self._clients[client] = thread
            return True

    def _run(self, client: _Client) -> None:
        level, reason = logging.INFO, "the connection is closed"
        try:
            self._serve(client)
        except (OSError, ProtocolError) as error:
            level, reason = logging.WARNING, str(error)
        finally:
            with self._lock:
                del self._clients[client]
                client.link.close()
            logger.log(
                level, "%s: %s; %d rows read and %d written in %d requests",
                client.name, reason, client.num_read, client.num_written, client.num_requests,
            )  # fmt: skip

    def _serve(self, client: _Client) -> None:
        link, limits = client.link, self._limits
        link.set_deadline(limits.hello_s)
        namespace = protocol.answer(link, self._key)
        client.is_known = True
        row_bytes = protocol.sent_namespace(namespace).row_bytes
        if not 0 < namespace.row_bytes <= limits.buffer_bytes - protocol.CHECKSUM.size:
            self._refuse(
                link,
                f"a row has {namespace.row_bytes} bytes; valid are 1 to {limits.buffer_bytes - protocol.CHECKSUM.size}",
            )
        try:
            opened = self._stores.acquire(protocol.sent_namespace(namespace))
        except OtherNamespaceError as error:
            self._refuse(link, str(error))
        except (QuireError, OSError):
            logger.exception("no store for the namespace %s can be opened", namespace.digest)
            self._refuse(link, "its store cannot be opened; see the log of the row server")
        try:
            link.set_deadline(limits.hello_s)
            rows_per_request = min(MAX_NAMES, limits.buffer_bytes // row_bytes)
            protocol.accept(link, rows_per_request)
            _Session(client, opened, self._buffers, row_bytes, rows_per_request, limits).run()
        finally:
            self._stores.release(opened)

    def _refuse(self, link: Link, reason: str) -> NoReturn:
        protocol.refuse(link, reason)
        raise ProtocolError(reason)


@dataclass(eq=False)
class _Client:
    """Connection and its counts; `is_known` after its handshake."""

    link: Link
    name: str
    is_known: bool = False
    num_requests: int = 0
    num_read: int = 0
    num_written: int = 0


class _Session:
    """Requests of one client, answered in order."""

    def __init__(
        self,
        client: _Client,
        opened: _OpenStore,
        buffers: queue.LifoQueue[memoryview],
        row_bytes: int,
        rows_per_request: int,
        limits: RowServerLimits,
    ) -> None:
        self._client, self._link, self._opened, self._buffers = client, client.link, opened, buffers
        self._row_bytes, self._rows_per_request, self._limits = row_bytes, rows_per_request, limits
        self._handlers = {
            RequestKind.FIND: self._find,
            RequestKind.READ: self._read,
            RequestKind.WRITE: self._write,
            RequestKind.REMOVE: self._remove,
            RequestKind.TOUCH: self._touch,
        }

    def run(self) -> None:
        """Answer until the client closes the connection.

        Raises:
            ProtocolError: a request is malformed. OSError: the connection failed, or is too slow.
        """
        while self._link.wait():
            self._link.set_deadline(self._limits.answer_s)
            kind, request_id, number = HEADER.unpack(self._link.receive(HEADER.size))
            if kind not in self._handlers:
                raise ProtocolError(f"a request is of kind {kind}, which does not exist")
            if kind in (RequestKind.READ, RequestKind.WRITE) and number > self._rows_per_request:
                raise ProtocolError(f"a request has {number} rows; {self._rows_per_request} are allowed")
            names = protocol.receive_names(self._link, number)
            try:
                self._handlers[kind](request_id, names)
            except RowStoreError as error:
                logger.warning("%s: %s", self._client.name, error)
                protocol.send_error(self._link, request_id, str(error))
            self._client.num_requests += 1

    def _find(self, request_id: int, names: list[bytes]) -> None:
        with self._opened.use() as store:
            found = store.find(names)
        self._link.send(HEADER.pack(ReplyKind.FLAGS, request_id, len(names)), bytes(found))

    def _read(self, request_id: int, names: list[bytes]) -> None:
        with self._rows(len(names)) as rows:
            with self._opened.use() as store:
                found = store.read(names, [[row] for row in rows])
            sent = [row for row, flag in zip(rows, found, strict=True) if flag]
            self._link.send(HEADER.pack(ReplyKind.ROWS, request_id, len(names)), bytes(found), *sent)
        self._client.num_read += len(sent)

    def _write(self, request_id: int, names: list[bytes]) -> None:
        with self._rows(len(names)) as rows:
            self._link.receive_into(rows)
            with self._opened.use() as store:
                number = store.write(names, [[row] for row in rows])
        self._link.send(HEADER.pack(ReplyKind.DONE, request_id, number))
        self._client.num_written += number

    def _touch(self, request_id: int, names: list[bytes]) -> None:
        with self._opened.use() as store:
            store.touch(names)
        self._link.send(HEADER.pack(ReplyKind.DONE, request_id, len(names)))

    def _remove(self, request_id: int, names: list[bytes]) -> None:
        with self._opened.use() as store:
            store.remove(names)
        self._link.send(HEADER.pack(ReplyKind.DONE, request_id, len(names)))

    @contextlib.contextmanager
    def _rows(self, number: int) -> Iterator[list[memoryview]]:
        """Yield room for the rows of a request, with time to transfer them.

        Raises:
            TimeoutError: other requests have all buffers for too long.
        """
        try:
            buffer = self._buffers.get(timeout=self._limits.answer_s)
        except queue.Empty:
            raise TimeoutError(f"no buffer is free within {self._limits.answer_s:g} s") from None
        try:
            size = self._row_bytes
            self._link.set_deadline(self._limits.answer_s + number * size / self._limits.bytes_per_s)
            yield [buffer[start : start + size] for start in range(0, number * size, size)]
        finally:
            self._buffers.put(buffer)


class _OpenStore:
    """Store of one namespace that clients share."""

    def __init__(self, digest: str, store: RowStore) -> None:
        self.digest, self.store = digest, store
        self.num_clients = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def use(self) -> Iterator[RowStore]:
        """Yield the store to one thread at a time."""
        with self._lock:
            try:
                yield self.store
            finally:
                self.store.pop_removed()  # Clients are not notified; otherwise the list would grow.


class _OpenStores:
    """Open stores by namespace; those without a client stay open while there is room."""

    def __init__(self, open_store: OpenStore, max_stores: int) -> None:
        self._open_store, self._max_stores = open_store, max_stores
        self._lock = threading.Lock()
        self._stores: OrderedDict[str, _OpenStore] = OrderedDict()  # Least recently acquired first.

    def acquire(self, namespace: Namespace) -> _OpenStore:
        """Return the store of a namespace; up to `max_stores` clients have one at a time.

        Raises:
            QuireError, OSError: it cannot be opened.
        """
        with self._lock:
            if namespace.digest not in self._stores:
                self._make_room()
                logger.info(
                    "namespace %s is opened, with rows of %d bytes", namespace.digest, namespace.row_bytes
                )
                self._stores[namespace.digest] = _OpenStore(namespace.digest, self._open_store(namespace))
            opened = self._stores[namespace.digest]
            self._stores.move_to_end(namespace.digest)
            opened.num_clients += 1
            return opened

    def release(self, opened: _OpenStore) -> None:
        with self._lock:
            opened.num_clients -= 1

    def close(self) -> None:
        with self._lock:
            while self._stores:
                self._stores.popitem()[1].store.close()

    def _make_room(self) -> None:
        if len(self._stores) == self._max_stores:  # So one of them has no client: the caller is none yet.
            oldest = next(opened for opened in self._stores.values() if opened.num_clients == 0)
            self._stores.pop(oldest.digest).store.close()


class _Listener:
    """Listening socket; that of a Unix socket is a file, which belongs to this process until `close`.

    Raises:
        StartupError: the address is in use, or none of this host.
    """

    def __init__(self, wanted: Address) -> None:
        self._closed = threading.Event()
        try:
            self._socket = listen_unix(wanted.path) if wanted.path else _listen_tcp(wanted)
        except OSError as error:
            raise StartupError(
                f"a row server cannot listen at {wanted}: {error}; give a free address of this host"
            ) from error
        self._path = wanted.path
        self.address = str(wanted if wanted.path else wanted._replace(port=self._socket.getsockname()[1]))

    def connections(self) -> Iterator[tuple[socket.socket, str]]:
        """Yield each connection and the address of its client, which is empty for a Unix socket, until `close`."""
        while not self._closed.is_set():
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                if not self._closed.is_set():
                    logger.warning("the row server cannot accept a client: %s", error)
                    self._closed.wait(_RETRY_S)
            else:
                yield connection, peer[0] if peer else ""

    def stop(self) -> None:
        """End `connections` and remove the file; may be called twice."""
        if not self._closed.is_set():
            self._closed.set()
            if (
                self._path
            ):  # First, so that no other server finds a file at which nothing listens, and replaces it.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def serve(
    address: str, open_store: OpenStore, key: bytes | None = None, limits: RowServerLimits | None = None
) -> None:
    """Serve rows until SIGTERM or SIGINT; call it in the main thread, before others start.

    Args: those of `RowServer`.

    Raises:
        ConfigError: the address is malformed, or the key is missing or too short.
        StartupError: the address is in use or cannot be listened on.
    """
    signals = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # Inherited by the threads of the server.
    try:
        server = RowServer(address, open_store, key, limits)
        try:
            server.start()
            signal.sigwait(signals)
        finally:
            server.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen_tcp(address: Address) -> socket.socket:
    family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address.host, address.port), family=family)
