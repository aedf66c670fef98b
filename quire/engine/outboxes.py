"""`Outboxes`: how a core tells each of its front ends what concerns it.

Invariant: the first front end is told everything that is of no request or call of another's, statistics above all, so
that these are counted once. News of the prefix cache are for all. What is told to a front end that is gone is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from quire.engine.core_ids import front_end_of, front_end_of_request
from quire.engine.messages import CoreMessage, EngineCoreOutputs, UtilityResult
from quire.engine.remote import messages_of
from quire.scheduler.output import RequestUpdate, SchedulerStats

LINGER_MS = 1000
FIRST = 0
STATS_S = 0.05
"""So often the first front end is told statistics of steps that have nothing else for it."""


class Outboxes:
    """One socket per front end, of which the first is there from the beginning."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        directory: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._directory = directory
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._stats_told_at = 0.0
        self.open(FIRST)

    def open(self, front_end: int) -> None:
        """From now on there is this one, too. It has bound its socket, so that no message waits for anything."""
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.linger = LINGER_MS
        socket.connect(f"ipc://{self._directory / messages_of(front_end)}")
        self._sockets[front_end] = socket

    def close(self, front_end: int) -> None:
        """It is gone; one that never was there is fine."""
        if front_end in self._sockets:
            self._sockets.pop(front_end).close(0)

    def tell(self, front_end: int, message: CoreMessage) -> None:
        if front_end in self._sockets:
            with suppress(zmq.Again):
                self._sockets[front_end].send(self._encoder.encode(message), zmq.NOBLOCK)

    def send(self, message: CoreMessage) -> None:
        """To whom it concerns."""
        if len(self._sockets) == 1:
            self.tell(FIRST, message)
        elif isinstance(message, EngineCoreOutputs):
            self._send_parts(message)
        else:
            self.tell(front_end_of(message.call_id) if isinstance(message, UtilityResult) else FIRST, message)

    def _send_parts(self, outputs: EngineCoreOutputs) -> None:
        parts: dict[int, list[RequestUpdate]] = {}
        for update in outputs.updates:
            parts.setdefault(front_end_of_request(update.request_id), []).append(update)
        if outputs.cache is not None:  # each front end chooses among cores
            parts = {front_end: parts.get(front_end, []) for front_end in self._sockets}
        if FIRST in parts or outputs.spent or self._are_due(outputs.stats):
            self._stats_told_at = self._clock()
            mine = parts.pop(FIRST, [])
            self.tell(FIRST, msgspec.structs.replace(outputs, updates=mine))
        for front_end, updates in parts.items():
            self.tell(front_end, EngineCoreOutputs(updates, None, outputs.timestamp, cache=outputs.cache))

    def _are_due(self, stats: SchedulerStats | None) -> bool:
        """Whether statistics alone are worth a message: the last before the core is idle are."""
        if stats is None:
            return False
        return not (stats.num_running or stats.num_waiting) or self._clock() - self._stats_told_at > STATS_S
