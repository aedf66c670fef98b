"""How many connections are open, for the limit, which is the whole server's.

Invariant: a connection is counted from when a process was given it until that process has said that it is closed.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.engine.ledger import Column, Page


class Census:
    """How many connections are open, for the limit; here and as long as there is one process, its own."""

    def num_open(self, own: Collection[object]) -> int:
        return len(own)

    def leave(self) -> None:
        """One of this process is closed."""


class SharedCensus(Census):
    """Where there are several processes.

    Args:
        page: of this process.
        whole: whether the limit is the server's; else each process has its own, that of its open files.
    """

    def __init__(self, page: Page, *, whole: bool) -> None:
        self._page = page
        self._whole = whole

    def num_open(self, own: Collection[object]) -> int:
        if not self._whole:
            return len(own)
        return int(self._page.total(Column.HANDED) - self._page.total(Column.CLOSED))

    def leave(self) -> None:
        self._page.add(Column.CLOSED, 1)
