# SPDX-License-Identifier: Apache-2.0
"""Shared-memory counters of a server's API processes: queues, tenants' accounts, loads of cores.

Invariant of `SharedCounters`: every process writes only its own slot (except `HANDED`, which the first process writes
for all), and all may read. So no process waits for another, and the slot of a dead one is known to be at rest. Tenant
accounts, which several write, are written under the lock, which the kernel releases for a dead process.
"""

from __future__ import annotations

import fcntl
import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import IO

WORD = 8
ACCOUNT = 4  # Numbers of one tenant's account.


class CounterField(IntEnum):
    """Counters of each slot; they are followed by each tenant's running requests in the process."""

    HANDED = 0  # Connections passed to the process.
    CLOSED = 1
    WAITING = 2  # Sequences without an update of the core.
    WAITING_TOKENS = 3
    COMPUTED_TOKENS = 4  # Prompt tokens computed since the process started.
    GENERATED_TOKENS = 5
    TURNS = 6  # Iterations of the process's event loop, as its heartbeat.


class LoadCounter(IntEnum):
    """Counters per core of the engine, following those."""

    SEQUENCES = 0  # In flight.
    WAITING_TOKENS = 1  # Prompt tokens without an update so far, less what is assumed to be cached.
    # Fraction of the KV cache held by running requests; written by the process that receives statistics.
    KV_USE = 2


class SharedCounters:
    """Doubles in an anonymous file that children inherit; for one process, in its own memory.

    Args:
        num_slots: processes.
        num_tenants: accounts.
        file: large enough, all zeros in the first process.
        num_cores: of the engine.
    """

    def __init__(
        self, num_slots: int, num_tenants: int = 0, file: IO[bytes] | None = None, num_cores: int = 1
    ) -> None:
        self.num_slots, self.num_tenants = num_slots, num_tenants
        self._width = _width(num_tenants, num_cores)
        self._file = file
        size = WORD * (num_slots * self._width + num_tenants * ACCOUNT)
        memory = bytearray(size) if file is None else mmap.mmap(file.fileno(), size)
        self._cells = memoryview(memory).cast("d")

    @staticmethod
    def create(num_slots: int, num_tenants: int, num_cores: int = 1) -> SharedCounters:
        """Create counters to be shared."""
        file = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the counters lives)
        file.write(bytes(WORD * (num_slots * _width(num_tenants, num_cores) + num_tenants * ACCOUNT)))
        file.flush()
        return SharedCounters(num_slots, num_tenants, file, num_cores)

    def fileno(self) -> int:
        assert self._file is not None, "these counters are not shared"
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; the mapping stays."""
        if self._file is not None:
            self._file.close()

    def slot(self, index: int) -> CounterSlot:
        return CounterSlot(self, index)

    def clear(self, index: int) -> None:
        """Clear the slot of a process that is gone."""
        for column in range(self._width):
            self._cells[index * self._width + column] = 0.0

    def get(self, index: int, column: int) -> float:
        return self._cells[index * self._width + column]

    def total(self, column: int) -> float:
        """Return the sum over all slots."""
        return sum(self._cells[column : self.num_slots * self._width : self._width])

    def add(self, index: int, column: int, amount: float) -> None:
        self._cells[index * self._width + column] += amount

    def put(self, index: int, column: int, value: float) -> None:
        self._cells[index * self._width + column] = value

    def load_column(self, core: int, load: LoadCounter) -> int:
        return _width(self.num_tenants, core) + load

    def account(self, tenant: int) -> memoryview[float]:
        """Return the numbers of a tenant, all 0 at first; access them under the lock."""
        start = self.num_slots * self._width + tenant * ACCOUNT
        return self._cells[start : start + ACCOUNT]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock out other processes, but not other threads of this one. Never block inside."""
        if self._file is None:
            yield
            return
        # Not `flock`: the file was inherited, and all who have it would have that lock.
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


class CounterSlot:
    """Slot of one process in the shared counters."""

    def __init__(self, counters: SharedCounters, index: int) -> None:
        self.counters = counters
        self.index = index

    def add(self, column: int, amount: float) -> None:
        self.counters.add(self.index, column, amount)

    def put(self, column: int, value: float) -> None:
        self.counters.put(self.index, column, value)

    def total(self, column: int) -> float:
        """Return the sum over all slots."""
        return self.counters.total(column)


def _width(num_tenants: int, num_cores: int) -> int:
    """Return the number of counters per slot."""
    return len(CounterField) + num_tenants + num_cores * len(LoadCounter)
