# SPDX-License-Identifier: Apache-2.0
"""Rows that are kept for other engines under leases, in memory.

A lease is a name of `NAME_BYTES` ASCII characters drawn at random, so that it is the name of no row. Other engines
renew it by `touch` and end it by `remove`, like any row.

Invariant: a row is kept as long as a lease that holds it, and no longer; a lease ends within `SWEEP_S` of its time,
whatever its owner does, and after `MOST_LIFE_S` however often it is renewed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.kv_cache.rows import LeaseStats
from quire.kv_store.memory import ROW_OVERHEAD_BYTES
from quire.kv_store.row_store import Row, RowStoreStats

MOST_LIFE_S = 600.0
MOST_LEASES = 10_000
SWEEP_S = 0.5


@dataclass(eq=False)
class _Lease:
    """Names of rows, and the time at which they are dropped."""

    since: float
    until: float
    last: float
    names: list[bytes] = field(default_factory=list)


class LeasedRows:
    """`RowStore` of offered rows, as other engines see it. Safe between threads.

    Args:
        max_bytes: limit of all rows and their bookkeeping.
        lease_s: life of a lease after its last renewal, in seconds.
    """

    finds_at_once = True
    medium = "OFFERS"
    is_writable = False

    def __init__(self, max_bytes: int, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._lease_s, self._clock = max_bytes, lease_s, clock
        self._changed = threading.Condition()
        self._rows: dict[bytes, bytes] = {}
        self._num_holders: dict[bytes, int] = {}
        self._leases: dict[bytes, _Lease] = {}
        self._num_bytes = 0
        self._num_expired = 0
        self._is_closed = False
        self._sweeper = threading.Thread(target=self._sweep, name="quire-kv-leases", daemon=True)
        self._sweeper.start()

    def offer(self, lease: bytes, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Keep copies of rows under a lease, which begins or is renewed; returns which there was room for."""
        with self._changed:
            if self._is_closed or (lease not in self._leases and len(self._leases) >= MOST_LEASES):
                return [False] * len(names)
            now = self._clock()
            held = self._leases.setdefault(lease, _Lease(now, now, now + MOST_LIFE_S))
            self._renew(held)
            return [self._keep(held, name, row) for name, row in zip(names, rows, strict=True)]

    def find(self, names: Sequence[bytes]) -> list[bool]:
        with self._changed:
            return [name in self._rows or name in self._leases for name in names]

    def read(self, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        with self._changed:
            kept = [self._rows.get(name) for name in names]
        return [stored is not None and _fill(row, stored) for stored, row in zip(kept, rows, strict=True)]

    def write(self, names: Sequence[bytes], rows: Sequence[Row]) -> int:
        """Return 0: only the engine itself offers rows."""
        return 0

    def touch(self, names: Sequence[bytes]) -> None:
        """Renew leases; names of rows are ignored."""
        with self._changed:
            for name in names:
                if name in self._leases:
                    self._renew(self._leases[name])

    def remove(self, names: Sequence[bytes]) -> None:
        """End leases, and drop rows whose content is wrong."""
        with self._changed:
            for name in names:
                if name in self._leases:
                    self._end(name)
                elif name in self._rows:
                    self._drop(name)

    def names(self) -> list[bytes]:
        """Return nothing: rows come and go with their leases."""
        return []

    def pop_removed(self) -> list[bytes]:
        """Return nothing: rows leave with their leases, and no one counts on them."""
        return []

    def stats(self) -> RowStoreStats:
        with self._changed:
            return RowStoreStats(
                num_rows=len(self._rows),
                num_bytes=self._num_bytes,
                max_bytes=self._max_bytes,
                num_evicted=self._num_expired,
            )

    def lease_stats(self) -> LeaseStats:
        """Return the number of leases and the age of the oldest."""
        with self._changed:
            now = self._clock()
            ages = [now - held.since for held in self._leases.values()]
            return LeaseStats(len(ages), max(ages, default=0.0))

    def close(self) -> None:
        """Return at once: the rows belong to the engine, which calls `shut_down`."""
        return None

    def shut_down(self) -> None:
        """Drop all rows and end the thread; may be called twice."""
        with self._changed:
            self._is_closed = True
            for lease in list(self._leases):
                self._end(lease)
            self._changed.notify_all()
        self._sweeper.join()

    def sweep(self) -> float | None:
        """End the leases whose time is over; returns the seconds until the next one ends, None without any."""
        with self._changed:
            now = self._clock()
            for lease in [lease for lease, held in self._leases.items() if held.until <= now]:
                self._num_expired += 1
                self._end(lease)
            return min((held.until - now for held in self._leases.values()), default=None)

    def _sweep(self) -> None:
        while not self._is_closed:
            wait_s = self.sweep()
            with self._changed:
                if not self._is_closed:
                    self._changed.wait(None if wait_s is None and not self._leases else SWEEP_S)

    def _renew(self, held: _Lease) -> None:
        held.until = min(self._clock() + self._lease_s, held.last)
        self._changed.notify_all()

    def _keep(self, held: _Lease, name: bytes, row: Row) -> bool:
        if name not in self._rows:
            num_bytes = sum(map(len, row)) + ROW_OVERHEAD_BYTES
            if self._num_bytes + num_bytes > self._max_bytes:
                return False
            self._rows[name] = b"".join(row)
            self._num_bytes += num_bytes
        held.names.append(name)
        self._num_holders[name] = self._num_holders.get(name, 0) + 1
        return True

    def _end(self, lease: bytes) -> None:
        for name in self._leases.pop(lease).names:
            left = self._num_holders.get(name, 0) - 1
            if left > 0:
                self._num_holders[name] = left
            elif left == 0:
                self._drop(name)

    def _drop(self, name: bytes) -> None:
        self._num_holders.pop(name, None)
        self._num_bytes -= len(self._rows.pop(name)) + ROW_OVERHEAD_BYTES


def _fill(row: Row, stored: bytes) -> bool:
    source, start = memoryview(stored), 0
    for part in row:
        part[:] = source[start : start + len(part)]
        start += len(part)
    return True
