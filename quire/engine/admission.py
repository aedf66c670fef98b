"""`Admission`: whether requests may come in now; asked before they cost anything.

Invariant: of what is asked only places are kept, each for as long as it says, and every refusal for want of room is
counted under its option.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.config import SchedulerConfig
from quire.engine.free_memory import FreeMemory, bytes_to_keep
from quire.engine.front_end import FrontEnd
from quire.engine.queue_limits import Place, WaitingSequences, check_queue, check_tokens, crowding
from quire.errors import NoRoomError
from quire.platforms import Host


class Admission:
    """The door of one front end.

    Args:
        memory: None: of this machine or container, as `--min-free-memory` says.
    """

    def __init__(self, front_end: FrontEnd, memory: FreeMemory | None = None) -> None:
        self._front_end = front_end
        self._memory = memory or _memory_of(Host(), front_end.config.scheduler.min_free_memory)

    @contextmanager
    def reserve(self, num_sequences: int) -> Iterator[Place]:
        """A place for a request of so many sequences, until they have joined the queue, or the end of the context.

        Raises:
            QueueFullError: not now; says what waits and which limit it meets.
            UnavailableError: the engine sleeps.
        """
        self._front_end.check_awake()
        with self._counted():
            check_queue(self._limits, self._waiting, num_sequences)
        place = Place(self._waiting, num_sequences)
        try:
            yield place
        finally:
            place.give_up()

    def check_tokens(self, place: Place, num_tokens: int) -> None:
        """Whether a prompt of so many tokens may have the place. Raises as `reserve`."""
        self._front_end.check_awake()
        with self._counted():
            check_tokens(self._limits, self._waiting, num_tokens)
        place.hold(num_tokens)

    def crowding(self) -> str | None:
        """Why others should be asked; None: no reason."""
        return crowding(self._limits, self._waiting)

    def check_memory(self) -> None:
        """Whether there is memory for work of any kind.

        With nothing in flight there is, however little is left: then waiting would not make it more.

        Raises:
            NoRoomError: not now; says how much is left.
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
