# SPDX-License-Identifier: Apache-2.0
"""Frames of bytes between an executor and one rank, over a stream socket.

Invariant: a frame is a four-byte length and its bytes, as `multiprocessing.connection` writes it, which may be used at
the other end. One thread reads; any may send, and frames never interleave: a backlog exists exactly as long as a
single thread sends it, and both begin and end under one lock.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

SPIN_S = 4e-4  # Spin time before sleeping: waking up takes a quarter of it.
_LENGTH = struct.Struct("!i")
_ROOM = 1 << 16


class RankWire:
    """One end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(True)
        self._inbox, self._begin, self._end = bytearray(_ROOM), 0, 0
        self._sending = threading.Condition()
        self._backlog: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame; blocks until it is written. Raises OSError if the other end is closed."""
        with self._sending:
            self._sending.wait_for(lambda: not self._backlog)
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def post(self, frame: bytes) -> None:
        """Send a frame without blocking; a thread sends the rest later. Raises OSError if the other end is closed."""
        parcel = memoryview(_LENGTH.pack(len(frame)) + frame)
        with self._sending:
            if not self._backlog:
                parcel = parcel[self._sent(parcel) :]
            if not parcel:
                return
            self._backlog.append(parcel)
            if len(self._backlog) == 1:
                threading.Thread(
                    target=self._send_backlog, args=[parcel], name="quire-backlog", daemon=True
                ).start()

    def recv(self, spin_s: float = 0.0) -> bytes:
        """Return the next frame, spinning before sleeping. Raises EOFError if the other end is closed."""
        until = time.perf_counter() + spin_s if spin_s else 0.0
        while (frame := self._next()) is None:
            self._read(until)
        return frame

    def frames(self) -> Iterator[bytes]:
        """Yield the available frames, for a caller that has polled. Raises EOFError if the other end is closed."""
        self._read()
        while (frame := self._next()) is not None:
            yield frame

    def shutdown(self) -> None:
        """Shut the connection down for both ends; callable from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end closed first

    def close(self) -> None:
        """Close the socket; may be called twice."""
        self.shutdown()
        self._socket.close()

    def _sent(self, parcel: memoryview) -> int:
        try:
            return self._socket.send(parcel, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _send_backlog(self, parcel: memoryview | None) -> None:
        """Send the backlog from its first frame on, until none is left."""
        while parcel is not None:
            try:
                self._socket.sendall(parcel)
            except OSError:
                self._drop_backlog()  # reported to the reader and to later senders
                return
            parcel = self._behind_first()

    def _behind_first(self) -> memoryview | None:
        """Return the next frame of the backlog after the first was sent; None: it is empty."""
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
        """Read some bytes; blocks."""
        room = memoryview(self._inbox)[self._end :]
        count = self._spun(room, spin_until) if spin_until else -1
        if count < 0:
            try:
                count = self._socket.recv_into(room)
            except ConnectionError:
                count = 0
        if not count:
            raise EOFError("the other end is closed")
        self._end += count

    def _spun(self, room: memoryview, until: float) -> int:
        """Return the number of bytes read while spinning; -1: none in time."""
        while time.perf_counter() < until:
            try:
                return self._socket.recv_into(room, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except ConnectionError:
                return 0
        return -1

    def _next(self) -> bytes | None:
        """Return the first whole frame; without one, make room for the rest."""
        held = self._end - self._begin
        length = _LENGTH.unpack_from(self._inbox, self._begin)[0] if held >= _LENGTH.size else 0
        if length < 0:
            raise EOFError("malformed frame")
        wanted = _LENGTH.size + length
        if held >= wanted:
            start = self._begin + _LENGTH.size
            self._begin += wanted
            return bytes(memoryview(self._inbox)[start : self._begin])
        if not held or self._begin + wanted > len(self._inbox):
            self._make_room(max(_ROOM, wanted))
        return None

    def _make_room(self, num_bytes: int) -> None:
        """Resize the buffer to `num_bytes` and move the held bytes to its start."""
        rest = bytes(memoryview(self._inbox)[self._begin : self._end])
        if len(self._inbox) != num_bytes:
            self._inbox = bytearray(num_bytes)
        self._inbox[: len(rest)] = rest
        self._begin, self._end = 0, len(rest)
