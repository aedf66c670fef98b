"""How much may wait: counted by the front end, so that a full queue costs a refused request next to nothing.

Invariant: a sequence waits from when its place is reserved, before its prompt is tokenized, until the core's first news
of it, or its end.
"""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire.engine.ledger import Column, Page
from quire.errors import QueueFullError

HIGH_WATER = 0.9
"""Of a limit; from there on a server says that others should be asked."""


class WaitingSequences:
    """Sequences without news so far, and places of some that are to come; `num_tokens` is the sum of their prompts."""

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
        """One that waits already is fine, if its prompt is as long."""
        if core_request_id not in self._num_tokens:
            self._num_tokens[core_request_id] = num_prompt_tokens
            self._count(1, num_prompt_tokens)

    def remove(self, core_request_id: str) -> None:
        """One that does not wait (any more) is fine."""
        num_tokens = self._num_tokens.pop(core_request_id, None)
        if num_tokens is not None:
            self._count(-1, -num_tokens)

    def reserve(self, num_sequences: int, num_tokens: int) -> None:
        """So many more are to come, or, below 0, so many fewer."""
        self._num_reserved += num_sequences
        self._count(num_sequences, num_tokens)

    def _count(self, num_sequences: int, num_tokens: int) -> None:
        self._sum += num_tokens


class Place:
    """Room that is kept in the queue while a request is made ready: for what of it has not joined yet."""

    def __init__(self, waiting: WaitingSequences, num_sequences: int) -> None:
        self._waiting = waiting
        self._num_sequences = self._num_tokens = 0
        self._keep(num_sequences, 0)

    @property
    def is_reserved(self) -> bool:
        """Return whether a part of the request has yet to join the queue."""
        return self._num_sequences > 0

    def hold(self, num_tokens: int) -> None:
        """So many tokens of prompts are known of it."""
        self._keep(0, num_tokens)

    def join(self, num_sequences: int, num_tokens: int) -> None:
        """So much of it stands in the queue itself; more than was kept for it is fine."""
        self._keep(-min(num_sequences, self._num_sequences), -min(num_tokens, self._num_tokens))

    def give_up(self) -> None:
        """No more of it will come. Twice is fine."""
        self._keep(-self._num_sequences, -self._num_tokens)

    def _keep(self, num_sequences: int, num_tokens: int) -> None:
        self._num_sequences += num_sequences
        self._num_tokens += num_tokens
        self._waiting.reserve(num_sequences, num_tokens)


class SharedWaiting(WaitingSequences):
    """Those of this front end, in a sum with those of the others: what `len` and `num_tokens` tell is of all."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self._page = page

    def __len__(self) -> int:
        return int(self._page.total(Column.WAITING))

    @property
    def num_tokens(self) -> int:
        return int(self._page.total(Column.WAITING_TOKENS))

    def _count(self, num_sequences: int, num_tokens: int) -> None:
        self._page.add(Column.WAITING, num_sequences)
        self._page.add(Column.WAITING_TOKENS, num_tokens)


def check_queue(limits: SchedulerConfig, waiting: WaitingSequences, num_sequences: int) -> None:
    """Whether so many sequences may join those that wait, of whose prompts nothing is known yet.

    When nobody waits, anything may: a request that is larger than a limit has its turn.

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
    """Whether prompts of so many tokens may join those that wait; where none waits, any may.

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
    """Why others should be asked, though there is some room yet; None: no reason."""
    for cap, num, what in (
        (limits.max_num_queued_reqs, len(waiting), "sequences"),
        (limits.max_num_queued_tokens, waiting.num_tokens, "prompt tokens"),
    ):
        if cap and num >= HIGH_WATER * cap:
            return (
                f"the queue is nearly full: {num} {what} wait for their first token, and the limit is {cap}"
            )
    return None
