# SPDX-License-Identifier: Apache-2.0
"""Connection counts for --max-connections, a server-wide limit.

Invariant: a connection counts from when it was handed to a process until that process has reported its end.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.engine.shared_counters import CounterField, CounterSlot


class ConnectionCount:
    """Connection count of a server with one API process."""

    def num_open(self, own: Collection[object]) -> int:
        return len(own)

    def leave(self) -> None:
        """Count a connection of this process as closed."""


class SharedConnectionCount(ConnectionCount):
    """Connection count of a server with several API processes.

    Args:
        slot: this process's slot of the shared counters.
        whole: whether the limit is server-wide; else it is per process (the limit of open files).
    """

    def __init__(self, slot: CounterSlot, *, whole: bool) -> None:
        self._slot = slot
        self._whole = whole

    def num_open(self, own: Collection[object]) -> int:
        if not self._whole:
            return len(own)
        return int(self._slot.total(CounterField.HANDED) - self._slot.total(CounterField.CLOSED))

    def leave(self) -> None:
        self._slot.add(CounterField.CLOSED, 1)
