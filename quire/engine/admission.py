# SPDX-License-Identifier: Apache-2.0
"""Admission control: checks queue and memory limits before a request costs anything.

Invariant: reservations are the only state, each held for its context. Every refusal is counted under its option.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.config import SchedulerConfig
from quire.engine.front_end import FrontEnd
from quire.engine.queue_limits import (
    FreeMemory,
    QueueReservation,
    WaitingSequences,
    bytes_to_keep,
    check_queue,
    check_tokens,
    crowding,
)
from quire.errors import NoRoomError
from quire.platforms import Host


class Admission:
    """Admission control of one front end.

    Args:
        memory: None: free memory of this machine or container, limited by `--min-free-memory`.
    """

    def __init__(self, front_end: FrontEnd, memory: FreeMemory | None = None) -> None:
        self._front_end = front_end
        self._memory = memory or _memory_of(Host(), front_end.config.scheduler.min_free_memory)

    @contextmanager
    def reserve(self, num_sequences: int) -> Iterator[QueueReservation]:
        """Reserve queue room for a request of `num_sequences` sequences, until they are queued or the context ends.

        Raises:
            QueueFullError: with the queue's size and the limit.
            UnavailableError: the engine sleeps.
        """
        self._front_end.check_awake()
        with self._counted():
            check_queue(self._limits, self._waiting, num_sequences)
        place = QueueReservation(self._waiting, num_sequences)
        try:
            yield place
        finally:
            place.release()

    def check_tokens(self, place: QueueReservation, num_tokens: int) -> None:
        """Check that a prompt of `num_tokens` tokens fits, and add them to the reservation; raises as `reserve`."""
        self._front_end.check_awake()
        with self._counted():
            check_tokens(self._limits, self._waiting, num_tokens)
        place.hold(num_tokens)

    def crowding(self) -> str | None:
        """Return why clients should try other servers; None: no reason."""
        return crowding(self._limits, self._waiting)

    def check_memory(self) -> None:
        """Check that there is memory for new work.

        Passes while nothing is in flight, because waiting would then free nothing.

        Raises:
            NoRoomError: with the memory left.
        """
        if self._front_end.num_unfinished:
            with self._counted():
                self._memory.check()

    @property
    def _limits(self) -> SchedulerConfig:
        return self._front_end.config.scheduler

    @property
    def _waiting(self) -> WaitingSequences:
        return self._front_end.output_processor.waiting

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except NoRoomError as error:
            self._front_end.stat_loggers.refused(error.limit)
            raise


def _memory_of(host: Host, asked_mib: int | None) -> FreeMemory:
    total_bytes = 0 if asked_mib is not None else host.total_bytes()
    return FreeMemory(bytes_to_keep(asked_mib, total_bytes), host.left_bytes)
