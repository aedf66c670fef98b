# SPDX-License-Identifier: Apache-2.0
"""Row store in memory: rows of one or several namespaces under one limit, least recently used ones evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from quire.errors import ConfigError
from quire.kv_store.row_store import Namespace, Row, RowStoreStats

ROW_OVERHEAD_BYTES = 512
"""Bookkeeping of one row, counted against the limit so that many small rows do not exceed it."""


class RowMemory:
    """Memory that stores share; the least recently used row of any of them is evicted. Safe between threads.

    Args:
        max_bytes: limit of all rows and their bookkeeping.

    Raises:
        ConfigError: the limit is not positive.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise ConfigError(f"the memory of a row store is {max_bytes} bytes; give it at least 1")
        self.max_bytes = max_bytes
        self.lock = threading.Lock()
        self.rows: OrderedDict[tuple[MemoryStore, bytes], bytes] = OrderedDict()  # Least recently used first.
        self._num_bytes = 0

    def touch(self, keys: Sequence[tuple[MemoryStore, bytes]]) -> None:
        """Make rows the most recently used ones, the first of `keys` last."""
        for key in reversed(keys):
            if key in self.rows:
                self.rows.move_to_end(key)

    def insert(self, key: tuple[MemoryStore, bytes], row: bytes) -> None:
        """Add a row; there is room for it."""
        self.rows[key] = row
        self._num_bytes += len(row) + ROW_OVERHEAD_BYTES

    def discard(self, key: tuple[MemoryStore, bytes]) -> bool:
        """Remove a row; returns whether there was one."""
        row = self.rows.pop(key, None)
        if row is not None:
            self._num_bytes -= len(row) + ROW_OVERHEAD_BYTES
        return row is not None

    def make_room(self, row_bytes: int, kept: set[tuple[MemoryStore, bytes]]) -> bool:
        """Evict rows until one of `row_bytes` fits; False if that would take one of `kept`."""
        while self._num_bytes + row_bytes + ROW_OVERHEAD_BYTES > self.max_bytes:
            oldest = next(iter(self.rows), None)
            if oldest is None or oldest in kept:
                return False
            self.discard(oldest)
            store, name = oldest
            store.note_evicted(name)
        return True


class MemoryStore:
    """`RowStore` in memory that ends with the process. Safe between threads."""

    finds_at_once = True
    medium = "MEMORY"
    is_writable = True

    def __init__(self, namespace: Namespace, memory: RowMemory) -> None:
        self._row_bytes = namespace.row_bytes
        self._memory = memory
        self._num_rows = self._num_evicted = 0
        self._removed: list[bytes] = []

    def find(self, names: Sequence[bytes]) -> list[bool]:
        with self._memory.lock:
            return [(self, name) in self._memory.rows for name in names]

    def read(self, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        keys = [(self, name) for name in names]
        with self._memory.lock:
            self._memory.touch(keys)
            return [self._fill(key, row) for key, row in zip(keys, rows, strict=True)]

    def touch(self, names: Sequence[bytes]) -> None:
        with self._memory.lock:
            self._memory.touch([(self, name) for name in names])

    def write(self, names: Sequence[bytes], rows: Sequence[Row]) -> int:
        keys = [(self, name) for name in names]
        kept = set(keys)
        with self._memory.lock:
            self._memory.touch(keys)
            for key, row in zip(keys, rows, strict=True):
                if key not in self._memory.rows:
                    if not self._memory.make_room(self._row_bytes, kept):
                        break
                    self._memory.insert(key, b"".join(row))
                    self._num_rows += 1
            self._memory.touch(keys)
            return sum(key in self._memory.rows for key in keys)

    def remove(self, names: Sequence[bytes]) -> None:
        with self._memory.lock:
            for name in names:
                if self._memory.discard((self, name)):
                    self._num_rows -= 1
                    self._removed.append(name)

    def note_evicted(self, name: bytes) -> None:
        """Count a row that the memory has evicted; the caller holds its lock."""
        self._num_rows -= 1
        self._num_evicted += 1
        self._removed.append(name)

    def names(self) -> list[bytes]:
        with self._memory.lock:
            return [name for store, name in self._memory.rows if store is self]

    def pop_removed(self) -> list[bytes]:
        with self._memory.lock:
            removed, self._removed = self._removed, []
        return removed

    def stats(self) -> RowStoreStats:
        with self._memory.lock:
            return RowStoreStats(
                num_rows=self._num_rows,
                num_bytes=self._num_rows * self._row_bytes,
                max_bytes=self._memory.max_bytes,
                num_evicted=self._num_evicted,
            )

    def close(self) -> None:
        """Drop all rows of this store; may be called twice."""
        with self._memory.lock:
            for key in [key for key in self._memory.rows if key[0] is self]:
                self._memory.discard(key)
            self._num_rows = 0

    def _fill(self, key: tuple[MemoryStore, bytes], row: Row) -> bool:
        stored = self._memory.rows.get(key)
        if stored is None:
            return False
        source, start = memoryview(stored), 0
        for part in row:
            part[:] = source[start : start + len(part)]
            start += len(part)
        return True
