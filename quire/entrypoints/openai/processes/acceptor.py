# SPDX-License-Identifier: Apache-2.0
"""Distribution of one port's connections over several processes.

Invariant: one process accepts, and hands each connection to the process with the fewest. So none is lost with a process
that dies, none waits for one that is starting, and a few long-lived ones are spread as evenly as thousands.
SO_REUSEPORT is not used: it distributes at random (of eight connections to four processes one often gets five and
another none), resets connections queued at a dead process's socket, and lets a second server join the port by mistake.
With one inherited socket the first process to wake up takes a whole burst. Handing a connection over costs the acceptor
some 50 microseconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from quire.engine.shared_counters import CounterField, SharedCounters
from quire.entrypoints.openai.connection_count import ConnectionCount

logger = logging.getLogger(__name__)

SUPERVISOR_SLOT = 0  # Slot of the process that accepts.
BATCH = 100  # Connections to accept or receive before other tasks run.
PAUSE_S = 1.0
OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Admit = Callable[[socket.socket], None]  # Serves a connection in this process.


class ConnectionTarget(Protocol):
    """Process that accepts connections from the acceptor: its slot, and our end of the socket pair."""

    slot: int
    connections: socket.socket


class ConnectionAcceptor:
    """Accepts connections and hands them to the processes that `targets` returns, or serves them itself."""

    def __init__(
        self,
        listener: socket.socket,
        counters: SharedCounters,
        admit: Admit,
        targets: Callable[[], Iterable[ConnectionTarget]],
    ) -> None:
        self._listener = listener
        self._counters = counters
        self._admit = admit
        self._targets = targets
        self._pause: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._on_arrival)

    def close(self) -> None:
        """Stop accepting; queued connections are refused when the listener is closed."""
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
                self._pause_accepting(error)
                return
            self._place(connection)

    def _place(self, connection: socket.socket) -> None:
        """Hand a connection to the least loaded process, or keep it."""
        for target in sorted(self._targets(), key=lambda target: self._load(target.slot)):
            if self._load(target.slot) < self._load(SUPERVISOR_SLOT) and self._hand_over(connection, target):
                return
        self._counters.add(SUPERVISOR_SLOT, CounterField.HANDED, 1)
        self._admit(connection)

    def _hand_over(self, connection: socket.socket, target: ConnectionTarget) -> bool:
        """Hand a connection over; False if that process has ended or its socket's buffer is full."""
        # counted before the process can see it and reject it as one too many
        self._counters.add(target.slot, CounterField.HANDED, 1)
        try:
            socket.send_fds(target.connections, [b"."], [connection.fileno()])
        except OSError:
            self._counters.add(target.slot, CounterField.HANDED, -1)
            return False
        connection.close()
        return True

    def _load(self, slot: int) -> tuple[float, float]:
        """Return the sort key of a process: open connections, then all connections it ever had."""
        handed = self._counters.get(slot, CounterField.HANDED)
        return handed - self._counters.get(slot, CounterField.CLOSED), handed

    def _pause_accepting(self, error: OSError) -> None:
        """Pause accepting for want of descriptors or memory; connections wait in the kernel."""
        if error.errno not in OUT_OF_ROOM:
            raise error
        logger.error("cannot accept a connection: %s", error.strerror)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._pause = loop.call_later(PAUSE_S, self.open)


class ConnectionReceiver:
    """Receives connections that the supervisor process has accepted."""

    def __init__(self, connections: socket.socket, admit: Admit, connection_count: ConnectionCount) -> None:
        self._connections = connections
        self._admit = admit
        self._connection_count = connection_count

    def open(self) -> None:
        self._connections.setblocking(False)
        asyncio.get_running_loop().add_reader(self._connections.fileno(), self._on_arrival)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connections.fileno())

    def _on_arrival(self) -> None:
        try:
            data, numbers, _, _ = socket.recv_fds(self._connections, BATCH, BATCH)
        except (BlockingIOError, InterruptedError):
            return
        for number in numbers:
            self._admit(socket.socket(fileno=number))
        for _ in range(len(data) - len(numbers)):  # more were sent than there were descriptors for
            self._connection_count.leave()
        if not data:
            self.close()
