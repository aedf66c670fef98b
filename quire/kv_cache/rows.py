# SPDX-License-Identifier: Apache-2.0
"""Rows: KV cache blocks as bytes that leave the engine and come back; the seam of stores (`quire.kv_store`).

A row is one block: its bytes in every cache tensor of a worker, in order. Its name is the block's pool key.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

import msgspec

RowAction = Literal["find", "touch", "load", "save", "remove", "list"]
STORE = ""
"""Place of `RowMover.start`: the engine's own store."""
OFFERS = "offers"
"""Place: rows that are kept for other engines. The first row of each action is a lease and no block."""


class RowStoreStats(msgspec.Struct):
    """State of a store; counters are totals since it was opened."""

    num_rows: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    num_corrupt: int = 0  # Rows whose checksum did not match; they were removed.
    num_evicted: int = 0


class LeaseStats(msgspec.Struct, frozen=True):
    """Leases under which rows are kept for other engines: their number, and the age of the oldest in seconds."""

    num_leases: int = 0
    oldest_s: float = 0.0


class RowResult(msgspec.Struct, frozen=True):
    """Outcome of an action.

    Args:
        done: one entry per row.
        failure: why the store did not work; None: it did.
        stats: the store's state after the action, of rank 0; None: it did not change.
        removed: rows that any rank's store has lost since the last report.
        names: answer to "list": rows that all ranks have, without "list" empty.
        leases: at the place of offers: the state of rank 0.
    """

    done: list[bool]
    failure: str | None = None
    stats: RowStoreStats | None = None
    removed: list[bytes] = []
    names: list[bytes] = []
    leases: LeaseStats | None = None


class RowStoreInfo(msgspec.Struct, frozen=True):
    """Properties of an open store.

    Args:
        medium: name of its tier, as in KV events ("DISK").
        row_bytes: bytes of a block on all ranks.
        is_writable: false if rows can only be read.
        num_rows: rows at the start.
        host, port: where the first rank offers rows to other engines; port 0: nowhere.
    """

    medium: str
    row_bytes: int
    is_writable: bool
    num_rows: int
    host: str = ""
    port: int = 0


def all_done(results: list[RowResult]) -> RowResult:
    """Return what holds on every rank."""
    failure = next((result.failure for result in results if result.failure is not None), None)
    done = [all(entries) for entries in zip(*(result.done for result in results), strict=True)]
    removed = list(dict.fromkeys(name for result in results for name in result.removed))
    others = [set(result.names) for result in results[1:]]
    names = [name for name in results[0].names if all(name in other for other in others)]
    return RowResult(done, failure, results[0].stats, removed, names, results[0].leases)


class RowMover(Protocol):
    """Moves rows between a worker's host blocks and stores, in order, on a thread for each place.

    Attributes:
        info: of the engine's own store, and of this worker's rows.
    """

    info: RowStoreInfo

    def use(self, host: Sequence[Any], cache: Sequence[Any] = ()) -> None:
        """Use these tensors [blocks, bytes] uint8 of the host tier from now on; no action is running.

        Rows go on to the tensors of the cache, which `use` may prepare for that until the next call.
        """

    def start(
        self, action: RowAction, rows: Sequence[tuple[bytes, int]], place: str = STORE
    ) -> Future[RowResult]:
        """Start an action; see `Executor.move_rows`."""

    def close(self) -> None:
        """Finish all actions and close the store; may be called twice."""
