# SPDX-License-Identifier: Apache-2.0
"""Rows on a local disk that another process writes, or none does.

A reader sees new rows at most `REFRESH_S` later. Files that were deleted meanwhile stay open, and readable unless their
room was taken (`room.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from quire.kv_store.disk.encryption import Sealer
from quire.kv_store.disk.namespaces import OpenNamespace, Root
from quire.kv_store.disk.segment import SegmentFile, SegmentLayout, segment_name
from quire.kv_store.disk.store import SLOTS, DiskStore
from quire.kv_store.row_store import Row

REFRESH_S = 0.5  # Well beyond a tick of the clock of files, see `SegmentFile.refresh`.


class DiskReader(DiskStore):
    """Rows that this process only reads; two threads change its index."""

    is_writable = False

    def __init__(
        self, root: Root, opened: OpenNamespace, layout: SegmentLayout, max_bytes: int, sealer: Sealer | None
    ) -> None:
        super().__init__(root, opened, layout, max_bytes, sealer)
        self._refreshing = threading.Lock()
        self._refreshed_at = time.monotonic()
        self._replaced: list[SegmentFile] = []  # not closed yet

    def find(self, names: Sequence[bytes]) -> list[bool]:
        found = super().find(names)
        if not all(found):
            self._refresh()
            found = super().find(names)
        return found

    def read(self, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        with self._io():
            while self._replaced:
                self._replaced.pop().close()
            return self._read_all(self._hidden(names), rows)

    def touch(self, names: Sequence[bytes]) -> None:
        """Do nothing: the writer notes its own uses only."""

    def write(self, names: Sequence[bytes], rows: Sequence[Row]) -> int:
        """Return how many of the rows there are; none is written."""
        return sum(self.find(names))

    def _drop_damaged(self, segment: SegmentFile, slot: int, name: bytes) -> None:
        """Drop a row, and count it unless the writer has used its slot since the last refresh."""
        known = segment.record(slot)
        if known is not None and known.name == name:
            self._num_corrupt += segment.reread(slot) == known
        self._drop(name)

    def _drop(self, name: bytes) -> None:
        """Remove a row from the index; its slot is the writer's."""
        if self._index.pop(name, None) is not None:
            self._removed.extend(self._names_of(name))

    def _refresh(self) -> None:
        """Index what the writer has changed since the last time, at most once in REFRESH_S."""
        if time.monotonic() < self._refreshed_at + REFRESH_S or not self._refreshing.acquire(blocking=False):
            return
        try:
            with self._io():
                listed = {file: number for number, file in self._opened.segment_files()}
                self._left_out &= listed.keys()
                for number in {*self._segments, *listed.values()}:
                    self._refresh_segment(number, segment_name(number))
        finally:
            self._refreshed_at = time.monotonic()
            self._refreshing.release()

    def _refresh_segment(self, number: int, file: str) -> None:
        former = self._segments.get(number)
        if former is not None and not former.is_replaced(self._opened.fd, file):
            self._index_changes(number)
        elif file not in self._left_out and self._open_segment(number, file):
            if former is not None:
                self._leave(number, former)
            self._index_segment(number)

    def _leave(self, number: int, former: SegmentFile) -> None:
        """Leave a file that another one has replaced; `read`, which may be reading it, closes it."""
        slots, _ = former.in_use()
        for name, place in zip(former.names(slots), (number * SLOTS + slots).tolist(), strict=True):
            if self._index.get(name) == place:
                self._drop(name)
        self._replaced.append(former)

    def _index_segment(self, number: int) -> None:
        slots, _ = self._segments[number].in_use()
        names = self._segments[number].names(slots)
        self._index.update(zip(names, (number * SLOTS + slots).tolist(), strict=True))

    def _index_changes(self, number: int) -> None:
        segment = self._segments[number]
        for slot, former in segment.refresh():
            place, now = number * SLOTS + slot, segment.record(slot)
            if now is not None:
                self._index[now.name] = place
            was_replaced = former is not None and (now is None or now.name != former.name)
            if former is not None and was_replaced and self._index.get(former.name) == place:
                self._drop(former.name)

    def _close_files(self) -> None:
        super()._close_files()
        for segment in self._replaced:
            segment.close()
        self._replaced.clear()
