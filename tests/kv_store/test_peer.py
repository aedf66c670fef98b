# SPDX-License-Identifier: Apache-2.0
"""Rows of a row server: right, or not read; and a server that goes on, whatever its clients send."""

from __future__ import annotations

import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, StartupError
from quire.kv_store import protocol
from quire.kv_store.memory import MemoryStore, RowMemory
from quire.kv_store.peer import PeerStore
from quire.kv_store.protocol import HEADER, Link, ReplyKind, RequestKind
from quire.kv_store.row_store import Namespace, RowStoreError
from quire.kv_store.server import RowServer, RowServerLimits
from tests.fixtures.folded import folded
from tests.kv_store.rows import content_of, empty_rows, name_of, rows_of

ROW_BYTES = 1000
NAMESPACE = Namespace({"weights": "one"}, ROW_BYTES)
OTHER = Namespace({"weights": "two"}, ROW_BYTES)
KEY = b"k" * 32


@contextmanager
def serving(
    address: str, key: bytes | None = None, limits: RowServerLimits | None = None
) -> Iterator[RowServer]:
    memory = RowMemory(1 << 20)
    limits = replace(
        limits or RowServerLimits(), hello_s=60.0, answer_s=60.0
    )  # as long as a busy machine may take
    server = RowServer(address, lambda namespace: MemoryStore(namespace, memory), key, limits)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def connected(
    address: str, key: bytes | None = None, namespace: Namespace = NAMESPACE, answer_s: float = 60.0
) -> Iterator[PeerStore]:
    store = PeerStore(address, namespace, key, connect_s=60.0, answer_s=answer_s)
    try:
        yield store
    finally:
        store.close()


def write(store: PeerStore, *numbers: int) -> int:
    return store.write([name_of(number) for number in numbers], rows_of(numbers, ROW_BYTES))


def read(store: PeerStore, *numbers: int) -> list[bytes | None]:
    rows = empty_rows(len(numbers), ROW_BYTES)
    done = store.read([name_of(number) for number in numbers], rows)
    return [b"".join(row) if was_read else None for row, was_read in zip(rows, done, strict=True)]


@pytest.fixture(params=["unix", "tcp", "tcp with a key"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, bytes | None]]:
    key = KEY if request.param == "tcp with a key" else None
    with serving(f"unix:{tmp_path}/s" if request.param == "unix" else "tcp://127.0.0.1:0", key) as server:
        yield server.address, key


def test_rows_are_those_that_were_written(place: tuple[str, bytes | None]) -> None:
    with connected(*place) as store, connected(*place) as second, connected(*place, OTHER) as other:
        assert write(store, 1, 2, 3) == 3
        assert write(second, 3, 4) == 2
        assert second.find([name_of(number) for number in range(6)]) == [False, True, True, True, True, False]
        assert read(second, 4, 5, 1) == [content_of(4, ROW_BYTES), None, content_of(1, ROW_BYTES)]
        assert read(other, 1, 2) == [None, None], "another namespace"
        store.touch([name_of(1), name_of(9)])
        store.remove([name_of(2), name_of(9)])
        assert read(second, 1, 2) == [content_of(1, ROW_BYTES), None]


numbers = st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True)


@given(
    st.lists(st.tuples(st.sampled_from(["read", "write", "remove", "find", "again"]), numbers), max_size=12)
)
def test_any_calls_equal_a_dictionary(calls: list[tuple[str, list[int]]]) -> None:
    limits = RowServerLimits(buffer_bytes=3 * (ROW_BYTES + 4))
    with serving("tcp://127.0.0.1:0", KEY, limits) as server, connected(server.address, KEY) as store:
        stored: set[int] = set()
        for call, named in calls:
            if call == "write":
                assert write(store, *named) == len(named)
                stored |= set(named)
            elif call == "read":
                expected = [content_of(n, ROW_BYTES) if n in stored else None for n in named]
                assert read(store, *named) == expected
            elif call == "remove":
                store.remove([name_of(number) for number in named])
                stored -= set(named)
            elif call == "find":
                assert store.find([name_of(n) for n in named]) == [n in stored for n in named]
            else:
                store.close()


def test_a_server_that_is_started_again_is_used_again(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    with connected(address) as store:
        with pytest.raises(RowStoreError, match="does not work"):
            store.find([name_of(1)])
        for _ in range(2):
            with serving(address):
                assert write(store, 1) == 1
                assert read(store, 1) == [content_of(1, ROW_BYTES)]
        with pytest.raises(RowStoreError, match="does not work"):
            read(store, 1)


def test_another_key_is_refused_by_both(place: tuple[str, bytes | None]) -> None:
    with connected(place[0], b"x" * 32) as store, pytest.raises(RowStoreError, match=r"another key|closed"):
        store.find([name_of(1)])
    with connected(*place) as store:
        assert write(store, 1) == 1


@given(st.binary(min_size=16, max_size=80))
def test_a_key_and_the_same_with_zeros_prove_different_things(key: bytes) -> None:
    """HMAC alone does not tell a key of zeros from none."""
    proofs = {
        protocol._prove(other, b"client", bytes(32), bytes(32))
        for other in (key, key + b"\0", b"", bytes(16))
    }
    assert len(proofs) == len({key, key + b"\0", b"", bytes(16)})


def test_a_burst_of_connections_does_not_turn_a_client_away(tmp_path: Path) -> None:
    """A Unix socket whose queue is full refuses a connection that does not wait."""
    with serving(f"unix:{tmp_path}/s", limits=RowServerLimits(max_clients=8)) as server, ExitStack() as stack:
        for _ in range(1000):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
            stranger.connect(f"{tmp_path}/s")
        with connected(server.address) as store:
            assert write(store, 1) == 1


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        RowServer(f"unix:{tmp_path}/none/s", lambda namespace: MemoryStore(namespace, RowMemory(1)))


def test_used_address_is_an_error_stale_socket_is_replaced(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    with serving(address), pytest.raises(StartupError, match="a server listens there"):
        RowServer(address, lambda namespace: MemoryStore(namespace, RowMemory(1)))
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "s"))
    stale.close()
    with serving(address), connected(address) as store:
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        assert write(store, 1) == 1
    (tmp_path / "s").write_text("a file of the user")
    with pytest.raises(StartupError, match="no socket"):
        RowServer(address, lambda namespace: MemoryStore(namespace, RowMemory(1)))


@folded(
    "address",
    ["unix:relative", f"unix:/{'x' * 107}", "tcp://host", "tcp://:1", "tcp://host:x", "tcp://host:1/path", "/path",
     "tcp://u@host:1", ""],
)  # fmt: skip
def test_invalid_row_server_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a row server"):
        PeerStore(address, NAMESPACE)


def test_other_machines_need_a_key() -> None:
    with pytest.raises(ConfigError, match="--kv-store-key-file"):
        PeerStore("tcp://192.0.2.1:1", NAMESPACE)
    with pytest.raises(ConfigError, match="has 3 bytes"):
        PeerStore("tcp://192.0.2.1:1", NAMESPACE, b"abc")


# Clients that send what they should not

HELLO = struct.pack("!8sI32s", protocol.MAGIC, protocol.VERSION, bytes(32))


def known(address: str) -> socket.socket:
    """A connection after its handshake, for requests that no client would send."""
    port = int(address.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), 60.0)
    link = Link(connection)
    link.set_deadline(60.0)
    protocol.begin(link, KEY, NAMESPACE)
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(60.0)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return True
    return True


REQUESTS = {
    "unknown": HEADER.pack(99, 1, 1) + name_of(1),
    "no names": HEADER.pack(RequestKind.FIND, 1, 0),
    "too many names": HEADER.pack(RequestKind.FIND, 1, 2**32 - 1),
    "too many rows": HEADER.pack(RequestKind.WRITE, 1, 4000),
    "twice": HEADER.pack(RequestKind.FIND, 1, 2) + name_of(1) * 2,
}


@pytest.mark.parametrize("request_bytes", REQUESTS.values(), ids=REQUESTS)
def test_a_malformed_request_costs_its_connection_alone(request_bytes: bytes) -> None:
    limits = RowServerLimits(buffer_bytes=10 * (ROW_BYTES + 4))
    with serving("tcp://127.0.0.1:0", KEY, limits) as server, connected(server.address, KEY) as store:
        assert write(store, 1) == 1
        with known(server.address) as evil:
            evil.sendall(request_bytes)
            assert is_closed(evil)
        assert read(store, 1) == [content_of(1, ROW_BYTES)]


@pytest.mark.parametrize("length", [0, 7, 44, 60])
def test_strangers_do_not_keep_others_out(length: int) -> None:
    """More half-open connections than the server has room for: the oldest of them make room."""
    with serving("tcp://127.0.0.1:0", KEY, RowServerLimits(max_clients=4)) as server:
        port = int(server.address.rpartition(":")[2])
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
        for stranger in strangers[3:]:
            stranger.sendall((HELLO + bytes(40))[:length])
        with connected(server.address, KEY) as store:
            assert write(store, 1) == 1
        for stranger in strangers:
            stranger.close()


# Servers that answer what they should not


@contextmanager
def scripted(answer: Callable[[Link, int], None]) -> Iterator[str]:
    """A server that shakes hands and then answers one request of one name with a function of its id."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            link = Link(connection)
            link.set_deadline(60.0)
            protocol.answer(link, KEY)
            protocol.accept(link, 16)
            _, request_id, number = HEADER.unpack(link.receive(HEADER.size))
            link.receive(number * protocol.NAME_BYTES)
            answer(link, request_id)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        thread.join()


def row(content: bytes, checksum: bytes | None = None) -> bytes:
    right = protocol.checksum(protocol.checksum_seed(NAMESPACE), name_of(1), [memoryview(content)])
    return (protocol.CHECKSUM.pack(right) if checksum is None else checksum) + content


GOOD = content_of(1, ROW_BYTES)
ANSWERS: dict[str, Callable[[int], bytes]] = {
    "nothing": lambda number: b"",
    "half a header": lambda number: HEADER.pack(ReplyKind.ROWS, number, 1)[:5],
    "half a row": lambda number: HEADER.pack(ReplyKind.ROWS, number, 1) + b"\1" + row(GOOD)[:500],
    "another id": lambda number: HEADER.pack(ReplyKind.ROWS, number + 1, 1) + b"\1" + row(GOOD),
    "another kind": lambda number: HEADER.pack(ReplyKind.FLAGS, number, 1) + b"\1",
    "more rows": lambda number: HEADER.pack(ReplyKind.ROWS, number, 2) + b"\1\1" + row(GOOD) * 2,
    "no flag": lambda number: HEADER.pack(ReplyKind.ROWS, number, 1) + b"\7" + row(GOOD),
    "garbage": lambda number: secrets.token_bytes(200),
    "an error": lambda number: HEADER.pack(ReplyKind.ERROR, number, 4) + b"full",
    "a long error": lambda number: HEADER.pack(ReplyKind.ERROR, number, 2**31) + b"full",
}


@folded("name", ANSWERS)
def test_a_wrong_answer_is_an_error_and_no_row(name: str) -> None:
    answering = scripted(lambda link, number: link.send(ANSWERS[name](number)))
    with (
        answering as address,
        connected(address, KEY) as store,
        pytest.raises(RowStoreError, match="does not work"),
    ):
        read(store, 1)


def test_a_silent_server_costs_a_bounded_time() -> None:
    over = threading.Event()

    def wait(link: Link, number: int) -> None:
        over.wait(10.0)

    with scripted(wait) as address, connected(address, KEY, answer_s=0.05) as store:
        with pytest.raises(RowStoreError, match=r"later than its deadline|timed out"):
            read(store, 1)
        over.set()


@pytest.mark.parametrize("content", [row(GOOD, b"\0\0\0\0"), row(content_of(2, ROW_BYTES), row(GOOD)[:4])])
def test_a_damaged_row_is_not_read(content: bytes) -> None:
    def answer(link: Link, number: int) -> None:
        link.send(HEADER.pack(ReplyKind.ROWS, number, 1), b"\1", content)
        _, removal, count = HEADER.unpack(link.receive(HEADER.size))
        link.receive(count * protocol.NAME_BYTES)
        link.send(HEADER.pack(ReplyKind.DONE, removal, count))

    with scripted(answer) as address, connected(address, KEY) as store:
        assert read(store, 1) == [None]
        assert store.stats().num_corrupt == 1
        assert store.pop_removed() == [name_of(1)]


def test_a_recorded_handshake_proves_nothing_later() -> None:
    """A proof covers the server's challenge, which is another one each time."""
    with serving("tcp://127.0.0.1:0", KEY) as server:
        port = int(server.address.rpartition(":")[2])
        recorded, client = bytearray(), socket.create_connection(("127.0.0.1", port), 60.0)
        with client:
            link = _Recording(client, recorded)
            link.set_deadline(60.0)
            protocol.begin(link, KEY, NAMESPACE)
        with socket.create_connection(("127.0.0.1", port), 60.0) as thief:
            thief.sendall(recorded)
            hello_and_proof = 8 + 4 + 32 + 32
            received = b""
            thief.settimeout(60.0)
            while piece := _received(thief):
                received += piece
            assert len(received) == hello_and_proof, "no answer follows"
        with connected(server.address, KEY) as store:
            assert write(store, 1) == 1


class _Recording(Link):
    """Link that keeps what is sent."""

    def __init__(self, connection: socket.socket, sent: bytearray) -> None:
        super().__init__(connection)
        self._sent = sent

    def send(self, *parts: bytes | memoryview) -> None:
        self._sent += b"".join(parts)
        super().send(*parts)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionError:
        return b""


@folded("kind", [RequestKind.FIND, RequestKind.READ, RequestKind.WRITE])
@folded("length", [5, 13, 40, 100])
def test_half_requests_cost_their_connection_alone(kind: RequestKind, length: int) -> None:
    with serving("tcp://127.0.0.1:0", KEY) as server, connected(server.address, KEY) as store:
        assert write(store, 1) == 1
        with known(server.address) as half:
            half.sendall((HEADER.pack(kind, 1, 2) + name_of(7) + name_of(8) + bytes(500))[:length])
        assert read(store, 1, 7) == [content_of(1, ROW_BYTES), None]


def test_no_more_clients_than_the_limit_are_served() -> None:
    with serving("tcp://127.0.0.1:0", KEY, RowServerLimits(max_clients=3)) as server, ExitStack() as stack:
        clients = [stack.enter_context(connected(server.address, KEY)) for _ in range(3)]
        assert [write(client, number) for number, client in enumerate(clients)] == [1, 1, 1]
        with pytest.raises(RowStoreError), connected(server.address, KEY) as late:
            late.find([name_of(1)])
        assert read(clients[0], 2) == [content_of(2, ROW_BYTES)]


def test_open_stores_are_bounded() -> None:
    """Namespaces beyond the limit close the least recently used store that has no client."""
    opened, closed = [], []

    class Counted(MemoryStore):
        def close(self) -> None:
            closed.append(self)
            super().close()

    def open_store(namespace: Namespace) -> MemoryStore:
        opened.append(namespace)
        return Counted(namespace, RowMemory(1 << 20))

    server = RowServer("tcp://127.0.0.1:0", open_store, KEY, RowServerLimits(max_clients=2, hello_s=60.0))
    server.start()
    try:
        for number in range(6):
            with connected(server.address, KEY, Namespace({"number": str(number)}, ROW_BYTES)) as store:
                assert _written_at_last(store, number) == 1
            assert len(opened) - len(closed) <= 2
    finally:
        server.close()
    assert (len(opened), len(set(closed))) == (6, 6)


def _written_at_last(store: PeerStore, number: int) -> int:
    """Write a row as soon as the server has noticed that an earlier client has gone."""
    until = time.monotonic() + 60.0
    while True:
        try:
            return write(store, number)
        except RowStoreError:
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_and_removes_its_socket(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "kv-store", "serve", f"unix:{path}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("listens at" in line for line in process.stderr)
        with connected(f"unix:{path}") as store:
            assert write(store, 1) == 1
            process.send_signal(number)
            assert process.wait(60) == 0
            with pytest.raises(RowStoreError):
                store.find([name_of(1)])
    assert not path.exists()
