"""`Admission`: whether requests may come in now; asked before they cost anything.

Invariant: nothing is kept of what is asked, and every refusal for want of room is counted under its option.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.engine.free_memory import FreeMemory, bytes_to_keep
from quire.engine.front_end import FrontEnd
from quire.engine.queue_limits import check_queue
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

    def check(self, num_sequences: int = 1, num_prompt_tokens: int = 0) -> None:
        """Whether a new request may come in.

        With nothing in flight it may however little memory is left: then waiting would not make it more.

        Raises:
            NoRoomError: not now; says what is short and which limit it meets.
            UnavailableError: the engine sleeps.
        """
        self.check_queue(num_sequences, num_prompt_tokens)
        self.check_memory()

    def check_memory(self) -> None:
        """Whether there is memory for work of any kind.

        Raises:
            NoRoomError: not now; says how much is left.
        """
        if self._front_end.num_unfinished:
            with self._counted():
                self._memory.check()

    def check_queue(self, num_sequences: int, num_prompt_tokens: int) -> None:
        """Whether so much of a request that has come in may join the queue.

        Raises:
            QueueFullError: not now; says what waits and which limit it meets.
            UnavailableError: the engine sleeps.
        """
        self._front_end.check_awake()
        limits, waiting = self._front_end.config.scheduler, self._front_end.output_processor.waiting
        with self._counted():
            check_queue(limits, waiting, num_sequences, num_prompt_tokens)

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
