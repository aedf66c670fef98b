"""How the connections of one port get to several processes.

Invariant: one process accepts, and gives each connection to the one that has the fewest; so none is lost with a process
that dies, none waits for one that is still starting, and a handful of long-lived ones is spread as evenly as thousands.

The kernel could do it, but not this. With SO_REUSEPORT it draws lots (of eight connections to four processes one often
gets five and another none), and resets what waits for a socket whose process dies; and nothing keeps a second server
from joining the port by mistake. From one inherited socket whoever wakes up first takes a whole burst. Handing one over
costs its acceptor some 50 microseconds, once per connection.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from quire.engine.ledger import Column, Ledger
from quire.entrypoints.openai.census import Census

logger = logging.getLogger(__name__)

FIRST = 0
"""The page of the process that accepts."""
BATCH = 100
"""So many connections are accepted, or taken over, before others have their turn."""
PAUSE_S = 1.0
OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Admit = Callable[[socket.socket], None]
"""Serves a connection in this process."""


class Room(Protocol):
    """A process that takes connections, by its page and its end of a pair of sockets."""

    page: int
    door: socket.socket


class Door:
    """Accepts; `rooms` are the other processes that can be given connections."""

    def __init__(
        self, listener: socket.socket, ledger: Ledger, admit: Admit, rooms: Callable[[], Iterable[Room]]
    ) -> None:
        self._listener = listener
        self._ledger = ledger
        self._admit = admit
        self._rooms = rooms
        self._pause: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._on_arrival)

    def close(self) -> None:
        """Accept no more; what waits is refused when the listener is closed."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()

    def _on_arrival(self) -> None:
        for _ in range(BATCH):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._rest(error)
                return
            self._place(connection)

    def _place(self, connection: socket.socket) -> None:
        """Give it away, or keep it if nobody else can take it."""
        for room in sorted(self._rooms(), key=lambda room: self._load(room.page)):
            if self._load(room.page) < self._load(FIRST) and self._hand_over(connection, room):
                return
        self._ledger.add(FIRST, Column.HANDED, 1)
        self._admit(connection)

    def _hand_over(self, connection: socket.socket, room: Room) -> bool:
        """False: that process is gone, or takes nothing out of its socket."""
        self._ledger.add(room.page, Column.HANDED, 1)  # before it is there, where it may be one too many
        try:
            socket.send_fds(room.door, [b"."], [connection.fileno()])
        except OSError:
            self._ledger.add(room.page, Column.HANDED, -1)
            return False
        connection.close()
        return True

    def _load(self, page: int) -> tuple[float, float]:
        """Open connections; between equals, those that it ever had."""
        handed = self._ledger.get(page, Column.HANDED)
        return handed - self._ledger.get(page, Column.CLOSED), handed

    def _rest(self, error: OSError) -> None:
        """There is no room for a connection; it waits in the kernel until there may be."""
        if error.errno not in OUT_OF_ROOM:
            raise error
        logger.error("no connection can be accepted: %s", error.strerror)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._pause = loop.call_later(PAUSE_S, self.open)


class BackDoor:
    """Where a process takes connections over that another has accepted."""

    def __init__(self, door: socket.socket, admit: Admit, census: Census) -> None:
        self._door = door
        self._admit = admit
        self._census = census

    def open(self) -> None:
        self._door.setblocking(False)
        asyncio.get_running_loop().add_reader(self._door.fileno(), self._on_arrival)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._door.fileno())

    def _on_arrival(self) -> None:
        try:
            data, numbers, _, _ = socket.recv_fds(self._door, BATCH, BATCH)
        except (BlockingIOError, InterruptedError):
            return
        for number in numbers:
            self._admit(socket.socket(fileno=number))
        for _ in range(len(data) - len(numbers)):  # there was no room for them
            self._census.leave()
        if not data:
            self.close()
