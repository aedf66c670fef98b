# SPDX-License-Identifier: Apache-2.0
"""Limits on waiting requests and free memory, checked in the front end so that a refusal is cheap.

Invariant: a sequence waits from its reservation, before its prompt is tokenized, until the core's first update
of it, or its end.

`FreeMemory` refuses new work before the machine, or the container, runs out of memory. It decides from a reading and
the time, both injected, and reads at most every `READ_EVERY_S`. Callers check it only while something is in flight, so
refusals end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.config import SchedulerConfig
from quire.engine.shared_counters import CounterField, CounterSlot
from quire.errors import MemoryShortError, QueueFullError

MIB = 2**20
READ_EVERY_S = 0.25
MAX_RESERVE_BYTES = 256 * MIB
RESERVE_FRACTION = 0.03


class FreeMemory:
    """Check of a memory reserve.

    Args:
        kept_bytes: reserve; 0 disables the check.
        read_bytes: returns the free bytes; on an OSError (no file descriptor, say) the last reading is kept.
        clock: monotonic seconds.
    """

    def __init__(
        self, kept_bytes: int, read_bytes: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept_bytes = kept_bytes
        self._read_bytes = read_bytes
        self._clock = clock
        self._left_bytes = kept_bytes
        self._next_reading = -math.inf

    def check(self) -> None:
        """Check that memory suffices for new work.

        Raises:
            MemoryShortError: with the numbers.
        """
        if not self._kept_bytes:
            return
        self._refresh()
        if self._left_bytes < self._kept_bytes:
            raise MemoryShortError(
                f"memory is short: {self._left_bytes / MIB:.0f} MiB are free while requests are in flight; "
                f"new requests need {self._kept_bytes / MIB:.0f} MiB; try again later"
            )

    def _refresh(self) -> None:
        now = self._clock()
        if now < self._next_reading:
            return
        self._next_reading = now + READ_EVERY_S
        try:
            self._left_bytes = self._read_bytes()
        except OSError:  # keep the last reading rather than refuse for lack of one
            return


def bytes_to_keep(asked_mib: int | None, total_bytes: int) -> int:
    """Return the reserve: `--min-free-memory`, else a small fraction of all memory."""
    return (
        min(MAX_RESERVE_BYTES, int(RESERVE_FRACTION * total_bytes)) if asked_mib is None else asked_mib * MIB
    )


HIGH_WATER = 0.9  # Fraction of a limit from which a server reports that it is crowded.


class WaitingSequences:
    """Sequences without an update so far, and reservations; `num_tokens` is the sum of their prompts."""

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}
        self._num_reserved = 0
        self._sum = 0

    def __len__(self) -> int:
        return len(self._num_tokens) + self._num_reserved

    @property
    def num_tokens(self) -> int:
        return self._sum

    def add(self, core_request_id: str, num_prompt_tokens: int) -> None:
        """Add a sequence; a waiting one is ignored."""
        if core_request_id not in self._num_tokens:
            self._num_tokens[core_request_id] = num_prompt_tokens
            self._count(1, num_prompt_tokens)

    def remove(self, core_request_id: str) -> None:
        """Remove a sequence; unknown ones are ignored."""
        num_tokens = self._num_tokens.pop(core_request_id, None)
        if num_tokens is not None:
            self._count(-1, -num_tokens)

    def reserve(self, num_sequences: int, num_tokens: int) -> None:
        """Change the reserved counts; negative numbers release."""
        self._num_reserved += num_sequences
        self._count(num_sequences, num_tokens)

    def _count(self, num_sequences: int, num_tokens: int) -> None:
        self._sum += num_tokens


class QueueReservation:
    """Reservation of queue room for the part of a request that has not joined the queue yet."""

    def __init__(self, waiting: WaitingSequences, num_sequences: int) -> None:
        self._waiting = waiting
        self._num_sequences = self._num_tokens = 0
        self._keep(num_sequences, 0)

    @property
    def is_reserved(self) -> bool:
        """True if a part of the request has yet to join the queue."""
        return self._num_sequences > 0

    def hold(self, num_tokens: int) -> None:
        """Add prompt tokens to the reservation."""
        self._keep(0, num_tokens)

    def join(self, num_sequences: int, num_tokens: int) -> None:
        """Convert a part of the reservation into queued sequences; an excess is ignored."""
        self._keep(-min(num_sequences, self._num_sequences), -min(num_tokens, self._num_tokens))

    def release(self) -> None:
        """Release the rest of the reservation; may be called twice."""
        self._keep(-self._num_sequences, -self._num_tokens)

    def _keep(self, num_sequences: int, num_tokens: int) -> None:
        self._num_sequences += num_sequences
        self._num_tokens += num_tokens
        self._waiting.reserve(num_sequences, num_tokens)


class SharedWaiting(WaitingSequences):
    """Waiting sequences counted together with other front ends: `len` and `num_tokens` are totals."""

    def __init__(self, page: CounterSlot) -> None:
        super().__init__()
        self._page = page

    def __len__(self) -> int:
        return int(self._page.total(CounterField.WAITING))

    @property
    def num_tokens(self) -> int:
        return int(self._page.total(CounterField.WAITING_TOKENS))

    def _count(self, num_sequences: int, num_tokens: int) -> None:
        self._page.add(CounterField.WAITING, num_sequences)
        self._page.add(CounterField.WAITING_TOKENS, num_tokens)


def check_queue(limits: SchedulerConfig, waiting: WaitingSequences, num_sequences: int) -> None:
    """Check that `num_sequences` sequences may join the queue before their prompts are tokenized.

    An empty queue accepts anything, so that a request larger than a limit gets its turn.

    Raises:
        QueueFullError: with the numbers.
    """
    cap = limits.max_num_queued_reqs
    if cap and waiting and len(waiting) + num_sequences > cap:
        raise QueueFullError(
            f"the queue is full: {len(waiting)} sequences wait for their first token and {num_sequences} more would "
            f"exceed the limit of {cap}; try again later",
            limit="max_num_queued_reqs",
        )
    check_tokens(limits, waiting, 1)


def check_tokens(limits: SchedulerConfig, waiting: WaitingSequences, num_tokens: int) -> None:
    """Check that prompts of `num_tokens` tokens may join the queue; an empty one accepts any.

    Raises:
        QueueFullError: with the numbers.
    """
    cap = limits.max_num_queued_tokens
    if cap and waiting.num_tokens and waiting.num_tokens + max(num_tokens, 1) > cap:
        raise QueueFullError(
            f"the queue is full: prompts of {waiting.num_tokens} tokens wait and {max(num_tokens, 1)} more would "
            f"exceed the limit of {cap} tokens; try again later",
            limit="max_num_queued_tokens",
        )


def crowding(limits: SchedulerConfig, waiting: WaitingSequences) -> str | None:
    """Return why clients should try other servers although there is room left; None: no reason."""
    for cap, num, what in (
        (limits.max_num_queued_reqs, len(waiting), "sequences"),
        (limits.max_num_queued_tokens, waiting.num_tokens, "prompt tokens"),
    ):
        if cap and num >= HIGH_WATER * cap:
            return (
                f"the queue is nearly full: {num} {what} wait for their first token, and the limit is {cap}"
            )
    return None
