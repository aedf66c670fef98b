"""How much may wait: counted by the front end, so that a full queue costs a refused request next to nothing.

Invariant: a sequence waits from when it is handed to the core until the core's first news of it, or its end.
"""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire.engine.ledger import Column, Page
from quire.errors import QueueFullError


class WaitingSequences:
    """Sequences without news so far; `num_tokens` is the sum of their prompts."""

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}
        self._sum = 0

    def __len__(self) -> int:
        return len(self._num_tokens)

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

    def _count(self, num_sequences: int, num_tokens: int) -> None:
        self._sum += num_tokens


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


def check_queue(
    limits: SchedulerConfig, waiting: WaitingSequences, num_sequences: int, num_tokens: int
) -> None:
    """Whether so many sequences with so many prompt tokens in all may join those that wait.

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
    cap = limits.max_num_queued_tokens
    if cap and waiting and waiting.num_tokens + max(num_tokens, 1) > cap:
        raise QueueFullError(
            f"the queue is full: prompts of {waiting.num_tokens} tokens wait and {max(num_tokens, 1)} more would "
            f"exceed the limit of {cap} tokens; try again later",
            limit="max_num_queued_tokens",
        )
