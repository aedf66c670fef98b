# SPDX-License-Identifier: Apache-2.0
"""Null executor with a store of rows whose delays and faults a test draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from quire.config import EngineConfig
from quire.executor.null import NullExecutor
from quire.kv_cache.rows import STORE, LeaseStats, RowAction, RowResult, RowStoreInfo
from quire.kv_cache.spec import KVCacheSpec

Content = dict[int, int]

GARBAGE: Content = {0: 1, 1: 1, 2: 1, 3: 1}


class Disk:
    """Rows by name, and the faults of the moment.

    Attributes:
        delay: number of polls until an action is done.
        loses: rows at these places of an action are not loaded or saved.
        leases: that a connector holds.
        fails: actions fail as a whole.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, Content] = {}
        self.delay = 0
        self.loses: frozenset[int] = frozenset()
        self.fails = False
        self.is_writable = True
        self.leases = LeaseStats()


class PolledFuture(Future[RowResult]):
    """Future whose action ends at a number of polls, and touches blocks as late as that."""

    def __init__(self, num_polls: int, act: Callable[[], RowResult]) -> None:
        super().__init__()
        self._num_polls = num_polls
        self._act = act

    def done(self) -> bool:
        self._num_polls -= 1
        if self._num_polls < 0 and not super().done():
            self.set_result(self._act())
        return super().done()


class StoringExecutor(NullExecutor):
    """Executor whose rows are the fingerprints of a host block."""

    disk = Disk()
    specs: Mapping[str, KVCacheSpec] = {}

    def __init__(self, config: EngineConfig, **args: Any) -> None:
        super().__init__(config, specs=self.specs, vocab_size=40, **args)

    def open_row_store(self) -> RowStoreInfo:
        return RowStoreInfo("DISK", 64, self.disk.is_writable, len(self.disk.rows))

    def move_rows(
        self, action: RowAction, rows: Sequence[tuple[bytes, int]], place: str = STORE
    ) -> Future[RowResult]:
        if action == "load":
            for _, block_id in rows:
                self._cache.host.fill(block_id, GARBAGE)
        disk, fails = self.disk, self.disk.fails
        loses = self.disk.loses if action in ("load", "save") else frozenset()

        def act() -> RowResult:
            if fails:
                return RowResult([False] * len(rows), "it is broken")
            done = [i not in loses and self._move(disk, action, *row) for i, row in enumerate(rows)]
            return RowResult(done, leases=disk.leases, names=list(disk.rows) if action == "list" else [])

        future = PolledFuture(0 if action == "remove" else disk.delay, act)
        future.done()
        return future

    def _move(self, disk: Disk, action: RowAction, name: bytes, block_id: int) -> bool:
        if action == "save":
            disk.rows.setdefault(name, self._cache.host.content(block_id))
        elif action == "load" and name in disk.rows:
            self._cache.host.fill(block_id, disk.rows[name])
        elif action == "remove":
            disk.rows.pop(name, None)
        return action in ("save", "touch", "remove") or name in disk.rows
