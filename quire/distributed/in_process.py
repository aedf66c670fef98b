# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process: for tests, and the oracle of every other transport."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue

from torch import Tensor

from quire.distributed.group import Group
from quire.errors import RankLostError

Mailbox = SimpleQueue[Tensor | str]  # Tensors from one rank to another, and at last the reason of the end.


class InProcess(Group):
    """Rank with a mailbox from and to each other one; `InProcess.group` makes a whole group."""

    def __init__(self, rank: int, mailboxes: Sequence[Sequence[Mailbox]], timeout_s: float) -> None:
        super().__init__(rank, len(mailboxes))
        self._inboxes = [row[rank] for row in mailboxes]
        self._outboxes = mailboxes[rank]
        self._timeout_s = timeout_s

    @staticmethod
    def group(size: int, timeout_s: float = 60.0) -> list[InProcess]:
        """Return all ranks of a group, each for a thread of its own."""
        mailboxes: list[list[Mailbox]] = [[SimpleQueue() for _ in range(size)] for _ in range(size)]
        return [InProcess(rank, mailboxes, timeout_s) for rank in range(size)]

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self.all_to_all([x] * self.size)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        peers = [peer for peer in range(self.size) if peer != self.rank]
        for peer in peers:
            self.send(parts[peer], peer)
        return [parts[peer] if peer == self.rank else self._next(peer) for peer in range(self.size)]

    def send(self, x: Tensor, to: int) -> None:
        self.check_peer(to)
        self._outboxes[to].put(x.clone())

    def recv(self, out: Tensor, source: int) -> None:
        self.check_peer(source)
        out.copy_(self._next(source))

    def close(self, reason: str = "it has ended") -> None:
        for outbox in self._outboxes:
            outbox.put(reason)

    def _next(self, source: int) -> Tensor:
        try:
            message = self._inboxes[source].get(timeout=self._timeout_s)
        except Empty:
            raise RankLostError([source], f"no answer within {self._timeout_s:g} s") from None
        if isinstance(message, str):
            raise RankLostError([source], message)
        return message
