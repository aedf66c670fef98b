# SPDX-License-Identifier: Apache-2.0
"""Frames arrive whole and in order, for any split of the bytes, and senders never block."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

from quire.executor.ranks.wire import RankWire

LARGE = 1 << 22


@pytest.fixture
def ways() -> Iterator[tuple[socket.socket, socket.socket]]:
    ways = socket.socketpair()
    yield ways
    for way in ways:
        way.close()


def frames(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.choice([0, 1, 5, 1000, 65531, 65532, 65533, 300_000])) for _ in range(60)]


@pytest.mark.parametrize("spin_s", [0.0, 1e-4])
def test_frames_come_whole_and_in_order(ways: tuple[socket.socket, socket.socket], spin_s: float) -> None:
    sent, other = frames(1), RankWire(ways[1])
    thread = threading.Thread(target=lambda: [RankWire(ways[0]).send(frame) for frame in sent])
    thread.start()
    assert [other.recv(spin_s) for _ in sent] == sent
    thread.join()


def test_bytes_that_come_one_by_one_are_frames_too(ways: tuple[socket.socket, socket.socket]) -> None:
    other, came = RankWire(ways[1]), []
    for byte in b"\0\0\0\3abc\0\0\0\0\0\0\0\1d":
        ways[0].send(bytes([byte]))
        came += list(other.frames())
    assert came == [b"abc", b"", b"d"]


def test_post_does_not_wait_and_keeps_the_order(ways: tuple[socket.socket, socket.socket]) -> None:
    wire, other = RankWire(ways[0]), RankWire(ways[1])
    sent = [bytes([number]) * size for number, size in enumerate([3, LARGE, 5, LARGE, 7])]
    for frame in sent:
        wire.post(frame)  # though nobody reads
    assert [other.recv() for _ in sent] == sent
    wire.post(b"last")
    assert other.recv() == b"last"


class Posting:
    """The lock of a wire, of which `post` is called whenever the thread that catches up has let it go."""

    def __init__(self, lock: Any, post: Callable[[], None]) -> None:
        self._lock, self._post = lock, post

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._lock.__exit__(*raised)
        if threading.current_thread().name == "quire-backlog":
            self._post()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def test_post_at_the_end_of_the_backlog_is_sent_once(
    ways: tuple[socket.socket, socket.socket],
) -> None:
    wire, other = RankWire(ways[0]), RankWire(ways[1])
    sent = [bytes([number]) * LARGE for number in range(4)]
    posted, in_turn = iter(sent[1:]), threading.RLock()

    def post() -> None:
        # Two threads may catch up one after the other: what one has taken is posted before the other takes the next.
        with in_turn, contextlib.suppress(StopIteration):
            wire.post(next(posted))

    wire._sending = Posting(wire._sending, post)  # type: ignore[assignment]
    wire.post(sent[0])
    assert [other.recv() for _ in sent] == sent


def test_send_does_not_interleave_with_posted_messages(ways: tuple[socket.socket, socket.socket]) -> None:
    wire, other = RankWire(ways[0]), RankWire(ways[1])
    wire.post(b"a" * LARGE)
    waits = threading.Thread(target=wire.send, args=[b"b"])
    waits.start()
    assert [other.recv(), other.recv()] == [b"a" * LARGE, b"b"]
    waits.join()


def test_send_behind_a_post_raises_after_a_shutdown(
    ways: tuple[socket.socket, socket.socket],
) -> None:
    wire, waiting = RankWire(ways[0]), threading.Event()
    wire.post(b"a" * LARGE)

    def send() -> bool:
        waiting.set()
        with pytest.raises(OSError):
            wire.send(b"b")
        return True

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        waiting.wait()
        wire.shutdown()
        assert sent.result(10)


def test_wire_is_compatible_with_multiprocessing(ways: tuple[socket.socket, socket.socket]) -> None:
    wire, other = RankWire(ways[0]), Connection(ways[1].detach())
    wire.send(b"a" * 70_000)
    other.send_bytes(b"b" * 20_000)
    assert (other.recv_bytes(), wire.recv()) == (b"a" * 70_000, b"b" * 20_000)
    other.close()


@pytest.mark.parametrize("last", [b"", b"\0\0", b"\0\0\0\5ab", b"\xff\xff\xff\xff"])
def test_an_end_within_a_frame_is_an_end(ways: tuple[socket.socket, socket.socket], last: bytes) -> None:
    ways[0].sendall(last)
    ways[0].close()
    with pytest.raises(EOFError):
        RankWire(ways[1]).recv()


def test_shutdown_wakes_the_reader(ways: tuple[socket.socket, socket.socket]) -> None:
    wire = RankWire(ways[0])
    timer = threading.Timer(0.05, wire.shutdown)
    timer.start()
    with pytest.raises(EOFError):
        wire.recv()
    with pytest.raises(EOFError):
        RankWire(ways[1]).recv()
    with pytest.raises(BrokenPipeError):
        wire.post(b"late")
    wire.close()
    wire.close()
    timer.join()
