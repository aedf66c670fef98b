"""Frames of bytes between an executor and one rank, over a stream socket.

Invariant: a frame is its length in four bytes and itself, as `multiprocessing.connection` writes one, which others may
use at the other end. One thread reads; any may send, and frames never mix: there is a backlog exactly as long as a
thread, and only one, catches up with it, and both begin and end under one lock.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

SPIN_S = 4e-4
"""For what comes within this a processor may wait without sleep: to be woken takes a quarter of it."""
_LENGTH = struct.Struct("!i")
_ROOM = 1 << 16


class Wire:
    """This process's end."""

    def __init__(self, way: socket.socket) -> None:
        self._way = way
        way.setblocking(True)
        self._inbox, self._begin, self._end = bytearray(_ROOM), 0, 0
        self._sending = threading.Condition()
        self._backlog: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._way.fileno()

    def send(self, frame: bytes) -> None:
        """Wait until the frame is on its way. Raises OSError: the other end is closed."""
        with self._sending:
            self._sending.wait_for(lambda: not self._backlog)
            self._way.sendall(_LENGTH.pack(len(frame)) + frame)

    def post(self, frame: bytes) -> None:
        """Wait for nothing: what the other end has no room for yet goes later. Raises OSError: it is closed."""
        parcel = memoryview(_LENGTH.pack(len(frame)) + frame)
        with self._sending:
            if not self._backlog:
                parcel = parcel[self._sent(parcel) :]
            if not parcel:
                return
            self._backlog.append(parcel)
            if len(self._backlog) == 1:
                threading.Thread(
                    target=self._catch_up, args=[parcel], name="quire-backlog", daemon=True
                ).start()

    def recv(self, spin_s: float = 0.0) -> bytes:
        """The next frame, for which to spin before going to sleep. Raises EOFError: the other end is closed."""
        until = time.perf_counter() + spin_s if spin_s else 0.0
        while (frame := self._next()) is None:
            self._read(until)
        return frame

    def frames(self) -> Iterator[bytes]:
        """Those that are there, for a caller that has polled. Raises EOFError: the other end is closed."""
        self._read()
        while (frame := self._next()) is not None:
            yield frame

    def shutdown(self) -> None:
        """Have both ends find this closed, from any thread."""
        try:
            self._way.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster

    def close(self) -> None:
        """Let go; twice is fine."""
        self.shutdown()
        self._way.close()

    def _sent(self, parcel: memoryview) -> int:
        try:
            return self._way.send(parcel, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _catch_up(self, parcel: memoryview | None) -> None:
        """Send the first of the backlog, and those behind it, until none is left."""
        while parcel is not None:
            try:
                self._way.sendall(parcel)
            except OSError:
                self._drop_backlog()  # whoever listens hears of it, and whoever sends again
                return
            parcel = self._behind_first()

    def _behind_first(self) -> memoryview | None:
        """What to send once the first of the backlog is sent; None: there is no backlog any more."""
        with self._sending:
            self._backlog.popleft()
            if self._backlog:
                return self._backlog[0]
            self._sending.notify_all()
            return None

    def _drop_backlog(self) -> None:
        with self._sending:
            self._backlog.clear()
            self._sending.notify_all()

    def _read(self, spin_until: float = 0.0) -> None:
        """Wait for some bytes."""
        room = memoryview(self._inbox)[self._end :]
        count = self._spun(room, spin_until) if spin_until else -1
        if count < 0:
            try:
                count = self._way.recv_into(room)
            except ConnectionError:
                count = 0
        if not count:
            raise EOFError("the other end is closed")
        self._end += count

    def _spun(self, room: memoryview, until: float) -> int:
        """How many bytes have come; -1: none in time."""
        while time.perf_counter() < until:
            try:
                return self._way.recv_into(room, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except ConnectionError:
                return 0
        return -1

    def _next(self) -> bytes | None:
        """The first whole frame; with none there is room for the rest of one."""
        held = self._end - self._begin
        length = _LENGTH.unpack_from(self._inbox, self._begin)[0] if held >= _LENGTH.size else 0
        if length < 0:
            raise EOFError("what comes is no frame")
        wanted = _LENGTH.size + length
        if held >= wanted:
            start = self._begin + _LENGTH.size
            self._begin += wanted
            return bytes(memoryview(self._inbox)[start : self._begin])
        if not held or self._begin + wanted > len(self._inbox):
            self._make_room(max(_ROOM, wanted))
        return None

    def _make_room(self, num_bytes: int) -> None:
        """From the beginning of so many bytes on, behind what is held."""
        rest = bytes(memoryview(self._inbox)[self._begin : self._end])
        if len(self._inbox) != num_bytes:
            self._inbox = bytearray(num_bytes)
        self._inbox[: len(rest)] = rest
        self._begin, self._end = 0, len(rest)
