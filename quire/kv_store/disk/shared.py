# SPDX-License-Identifier: Apache-2.0
"""Disk store of several engines: each writes to a directory of its own, and reads those of the others.

Invariant: other writers' stores are opened by whoever calls `find`, and closed on the I/O thread, which reads them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path

import msgspec

from quire.errors import ConfigError
from quire.kv_store.disk.opening import open_disk_store, open_rows_of
from quire.kv_store.disk.reader import REFRESH_S
from quire.kv_store.disk.store import DiskStore
from quire.kv_store.row_store import Namespace, Row, RowStoreError, RowStoreStats

logger = logging.getLogger(__name__)
RETRY_S = 10.0


class SharedDiskStore:
    """`RowStore` of the rows of all engines with one namespace that use one directory.

    Rows that any of them has are not written again. What another engine wrote is found a second later at the latest.
    Reads of others' rows do not count as uses: their writers know their own ones only.

    Args: those of `open_disk_store`.

    Raises:
        ConfigError, RowStoreError: as `open_disk_store`.
    """

    finds_at_once = True
    medium = "DISK"

    def __init__(
        self, directory: Path, namespace: Namespace, max_bytes: int, key: bytes | None = None
    ) -> None:
        self._directory, self._namespace, self._key = directory, namespace, key
        self._own = open_disk_store(directory, namespace, max_bytes, key, beside=True)
        self._others: dict[str, DiskStore] = {}
        self._left_out: set[str] = set()  # directories that cannot be read
        self._gone: list[DiskStore] = []  # deleted, and not closed yet
        self._looking = threading.Lock()
        self._look_at = 0.0
        self._is_deleted = False
        self.is_writable = self._own.is_writable
        self._look()

    @property
    def num_others(self) -> int:
        """Directories of other writers, past ones among them."""
        return len(self._others)

    def find(self, names: Sequence[bytes]) -> list[bool]:
        found = self._own.find(names)
        if not all(found):
            self._look()
            self._fill(found, lambda other, places: other.find([names[at] for at in places]))
        return found

    def read(self, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        self._close_gone()
        done = self._own.read(names, rows)

        def read(other: DiskStore, places: list[int]) -> list[bool]:
            return other.read([names[at] for at in places], [rows[at] for at in places])

        self._fill(done, read)
        return done

    def write(self, names: Sequence[bytes], rows: Sequence[Row]) -> int:
        self._close_gone()
        elsewhere = [False] * len(names)
        self._fill(elsewhere, lambda other, places: other.find([names[at] for at in places]))
        here = [not there for there in elsewhere]
        return sum(elsewhere) + self._own.write([*compress(names, here)], [*compress(rows, here)])

    def touch(self, names: Sequence[bytes]) -> None:
        self._own.touch(names)

    def remove(self, names: Sequence[bytes]) -> None:
        """Remove rows, those of others from this engine's index only."""
        for store in self._stores:
            store.remove(names)

    def names(self) -> list[bytes]:
        return list({name: None for store in self._stores for name in store.names()})

    def pop_removed(self) -> list[bytes]:
        removed = [name for store in self._stores for name in store.pop_removed()]
        found = [False] * len(removed)
        self._fill(found, lambda store, places: store.find([removed[at] for at in places]), self._stores)
        return [name for name, is_there in zip(removed, found, strict=True) if not is_there]

    def stats(self) -> RowStoreStats:
        """Return the sums; `num_bytes` and `max_bytes` are those of this engine's rows."""
        own, others = self._own.stats(), [other.stats() for other in self._stores[1:]]
        return msgspec.structs.replace(
            own,
            num_rows=own.num_rows + sum(other.num_rows for other in others),
            num_corrupt=own.num_corrupt + sum(other.num_corrupt for other in others),
        )

    def close(self) -> None:
        self._close_gone()
        for store in self._stores:
            store.close()
        self._others.clear()

    @property
    def _stores(self) -> list[DiskStore]:
        """This engine's own store first."""
        return [self._own, *list(self._others.values())]

    def _fill(
        self,
        found: list[bool],
        ask: Callable[[DiskStore, list[int]], list[bool]],
        stores: Sequence[DiskStore] | None = None,
    ) -> None:
        """Ask stores, by default those of others, for the places that are not found yet; one that fails is left."""
        for store in self._stores[1:] if stores is None else stores:
            places = [at for at, is_there in enumerate(found) if not is_there]
            if not places:
                return
            try:
                answers = ask(store, places)
            except RowStoreError as error:
                logger.warning("the KV cache rows of another engine are left out: %s", error)
                self._left_out.add(store.name)
                self._leave(store.name)
                continue
            for at, answer in zip(places, answers, strict=True):
                found[at] = answer

    # Other writers

    def _look(self) -> None:
        """Open the directories that have come, and leave those that have gone, at most once in REFRESH_S."""
        if time.monotonic() < self._look_at or not self._looking.acquire(blocking=False):
            return
        try:
            there = set(self._own.directories())
            self._note_deletion(is_deleted=self._own.name not in there)
            there -= {self._own.name}
            self._left_out &= there
            for name in self._others.keys() - there:
                self._leave(name)
            for name in sorted(there - self._others.keys() - self._left_out):
                self._open(name)
        except FileNotFoundError:
            self._note_deletion(is_deleted=True)
            self._look_at = time.monotonic() + RETRY_S
        except OSError as error:
            logger.warning("the KV cache rows of other engines cannot be looked for: %s", error)
            self._look_at = time.monotonic() + RETRY_S
        else:
            self._look_at = time.monotonic() + REFRESH_S
        finally:
            self._looking.release()

    def _note_deletion(self, *, is_deleted: bool) -> None:
        if is_deleted and not self._is_deleted:
            logger.warning(
                "the rows of this engine in %s were deleted by another program: the KV cache on disk is read and "
                "written on, but takes its room until this engine ends, and is lost then; start the engine again",
                self._directory / self._own.name,
            )
        self._is_deleted = is_deleted

    def _open(self, name: str) -> None:
        try:
            self._others[name] = open_rows_of(self._directory, self._namespace, name, self._key)
        except (ConfigError, RowStoreError) as error:
            logger.warning("the KV cache rows of another engine are left out: %s", error)
            self._left_out.add(name)

    def _leave(self, name: str) -> None:
        other = self._others.pop(name, None)
        if other is not None:
            self._gone.append(other)

    def _close_gone(self) -> None:
        while self._gone:
            self._gone.pop().close()
