# SPDX-License-Identifier: Apache-2.0
"""Rows on a local disk, for their only writer.

Invariant: every slot of the segments is in the index or in `_free`. Another writer in need of room may take a segment
away (`room.py`), so rows are written only under the lock of the files, which excludes that.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import time
from collections.abc import Sequence

from quire.kv_store.disk.encryption import Sealer
from quire.kv_store.disk.files import NO_ROOM
from quire.kv_store.disk.namespaces import OpenNamespace, Root
from quire.kv_store.disk.room import keep_limit, make_room
from quire.kv_store.disk.segment import Record, SegmentFile, SegmentLayout, segment_name
from quire.kv_store.disk.store import SLOTS, DiskStore
from quire.kv_store.row_store import Row

logger = logging.getLogger(__name__)
SEGMENT_BYTES = 256 << 20
MAX_SEGMENTS = 128  # Open files of a store: with larger limits segments are larger.
MIN_SEGMENT_ROWS = 8
LOCK_S = 1.0  # Other ranks grow at the same moment, each for some milliseconds.
GROW_AGAIN_S = 10.0  # Time after which a store that reached its limit checks whether others have room for it.
WRITE_AGAIN_S = 60.0  # Time after which a file system that was read-only is tried again.


class DiskWriter(DiskStore):
    """Rows that this process reads and writes."""

    is_writable = True

    def __init__(
        self, root: Root, opened: OpenNamespace, layout: SegmentLayout, max_bytes: int, sealer: Sealer | None
    ) -> None:
        super().__init__(root, opened, layout, max_bytes, sealer)
        self._free: list[int] = []  # heap of places
        self._grow_at = 0.0
        self._read_only_until = 0.0
        self._has_told_full = False

    def read(self, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        hidden = self._hidden(names)
        with self._io():
            done = self._read_all(hidden, rows)
            used = [name for name, was_read in zip(hidden, done, strict=True) if was_read]
            self._touch(used)
            self._flush()
        return done

    def touch(self, names: Sequence[bytes]) -> None:
        with self._io():
            self._touch(self._hidden(names))
            self._flush()

    def write(self, names: Sequence[bytes], rows: Sequence[Row]) -> int:
        hidden = self._hidden(names)
        with self._io():
            self._drop_taken()
            self._touch(hidden)  # first, so that others are evicted before them
            rows_of = zip(hidden, rows, strict=True)
            self._write_new([one for one in rows_of if one[0] not in self._index], frozenset(hidden))
            self._touch(hidden)
            self._flush()
            self._remember(hidden, names)
        return sum(name in self._index for name in hidden)

    def remove(self, names: Sequence[bytes]) -> None:
        super().remove(names)
        with self._io():
            self._flush()

    # Opening

    def _open_segments(self) -> None:
        self._opened.remove_unfinished()
        keep_limit(self._root, self._opened, self._max_bytes)
        super()._open_segments()
        self._free_others()

    def _leave_out(self, file: str, fault: str) -> None:
        """Delete a file that is no segment of this namespace."""
        super()._leave_out(file, fault)
        os.unlink(file, dir_fd=self._opened.fd)

    def _free_others(self) -> None:
        """Free slots that no row of the index has; those that are not free yet are damaged."""
        used = set(self._index.values())
        for number, segment in self._segments.items():
            free = [slot for slot in range(segment.num_slots) if number * SLOTS + slot not in used]
            self._num_corrupt += segment.free(free)
            self._free += [number * SLOTS + slot for slot in free]
        heapq.heapify(self._free)

    # Writing

    def _write_new(self, new: Sequence[tuple[bytes, Row]], keep: frozenset[bytes]) -> None:
        """Write rows head first, into free slots, new segments, and slots of evicted rows, none of them in `keep`."""
        while len(self._free) < len(new) and self._grow():
            pass
        if not new or self._is_read_only or not self._opened.lock_files_within(LOCK_S):
            return
        try:
            self._drop_taken()
            self._write_into_own(new, keep)
        finally:
            self._opened.unlock_files()

    def _write_into_own(self, new: Sequence[tuple[bytes, Row]], keep: frozenset[bytes]) -> None:
        """Do so with the slots that there are."""
        places = [heapq.heappop(self._free) for _ in range(min(len(new), len(self._free)))]
        places += self._evict(len(new) - len(places), keep)
        num_written = self._write_rows(new, sorted(places))
        if num_written < len(places) and not self._is_read_only:
            # The disk is full. A slot that was never used may have no blocks yet; those of rows have.
            rest = new[num_written:]
            self._write_rows(rest, sorted(self._evict(len(rest), keep)))

    def _write_rows(self, new: Sequence[tuple[bytes, Row]], places: Sequence[int]) -> int:
        """Write rows into free slots, as many as there are, until the disk is full; returns how many were written."""
        self._flush()
        for index, ((name, row), place) in enumerate(zip(new, places, strict=False)):
            segment, slot = self._segments[place // SLOTS], place % SLOTS
            parts = row if self._sealer is None else [self._sealer.seal(name, row)]
            try:
                checksum = segment.write(slot, name, parts)
            except OSError as error:
                for unused in places[index:]:
                    heapq.heappush(self._free, unused)
                if self._takes_nothing(error):
                    return index
                raise
            segment.set(slot, Record(name, self._next_sequence(), checksum))
            self._index[name] = place
        return len(places)

    def _evict(self, count: int, keep: frozenset[bytes]) -> list[int]:
        """Evict up to `count` of the least recently used rows; returns their places, which are not in `_free`."""
        places: list[int] = []
        while len(places) < count and self._index:
            name = next(iter(self._index))
            if name in keep:
                break
            places.append(self._forget(name))
        self._num_evicted += len(places)
        return places

    def _grow(self) -> bool:
        """Make a segment if the limit and the disk have room for one."""
        if time.monotonic() < self._grow_at or self._is_read_only or not self._root.lock_within(LOCK_S):
            return False
        self._grow_at = time.monotonic() + GROW_AGAIN_S
        try:
            num_slots = self._num_slots_to_add()
            if num_slots == 0:
                return False
            number = self._opened.free_number(self._segments)
            segment = SegmentFile.create(self._opened.fd, segment_name(number), self._layout, num_slots)
        except OSError as error:
            if self._takes_nothing(error):
                return False
            raise
        finally:
            self._root.unlock()
        self._segments[number] = segment
        self._free += range(number * SLOTS, number * SLOTS + num_slots)
        heapq.heapify(self._free)
        self._grow_at = 0.0
        return True

    def _num_slots_to_add(self) -> int:
        """Return the size of the next segment in slots, making room for it; 0 if there is none."""
        usual = max(min(SEGMENT_BYTES, self._max_bytes // 8), self._max_bytes // MAX_SEGMENTS)
        wanted = max(MIN_SEGMENT_ROWS, self._layout.num_slots_in(usual))
        bytes_of, least = self._layout.segment_bytes, MIN_SEGMENT_ROWS if self._segments else 1
        room = make_room(self._root, self.name, bytes_of(wanted), bytes_of(least), self._max_bytes)
        return min(wanted, self._layout.num_slots_in(room))

    def _drop_taken(self) -> None:
        """Drop the rows of segments that another writer has taken away."""
        taken = {number for number, segment in self._segments.items() if segment.is_taken()}
        if not taken:
            return
        for name in [name for name, place in self._index.items() if place // SLOTS in taken]:
            del self._index[name]
            self._removed.extend(self._names_of(name))
            self._num_evicted += 1
        self._free = [place for place in self._free if place // SLOTS not in taken]
        heapq.heapify(self._free)
        for number in taken:
            self._segments.pop(number).close()

    def _drop_damaged(self, segment: SegmentFile, slot: int, name: bytes) -> None:
        """Drop a row, and count it unless its room was taken."""
        if segment.is_taken():
            self._drop_taken()
            return
        known = segment.record(slot)
        self._num_corrupt += known is not None and known.name == name
        self._drop(name)

    def _drop(self, name: bytes) -> None:
        heapq.heappush(self._free, self._forget(name))

    def _forget(self, name: bytes) -> int:
        """Remove a row and free its record; returns its place."""
        place = self._index.pop(name)
        self._segments[place // SLOTS].free([place % SLOTS])
        self._removed.extend(self._names_of(name))
        return place

    def _touch(self, names: Sequence[bytes]) -> None:
        """Make those rows that there are the most recently used ones, the first of them last."""
        for name in reversed(names):
            place = self._index.get(name)
            if place is not None:
                self._index.move_to_end(name)
                self._segments[place // SLOTS].touch(place % SLOTS, self._next_sequence())

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _flush(self) -> None:
        """Write changed records. If the disk takes none they wait for the next call: a stale record is a miss."""
        if self._is_read_only:
            return
        try:
            for segment in self._segments.values():
                segment.flush()
        except OSError as error:
            if not self._takes_nothing(error):
                raise

    @property
    def _is_read_only(self) -> bool:
        return time.monotonic() < self._read_only_until

    def _takes_nothing(self, error: OSError) -> bool:
        """Return whether an error means no more than that the disk is full or its file system has become read-only.

        Many do after errors of the disk. Rows are then read as before, and now and then a write is tried.
        """
        if error.errno == errno.EROFS:
            self._read_only_until = time.monotonic() + WRITE_AGAIN_S
            logger.warning(
                "the file system of %s is read-only: its KV cache rows are read, and none is saved for %g s",
                self._opened.path,
                WRITE_AGAIN_S,
            )
        elif error.errno in NO_ROOM and not self._has_told_full:
            self._has_told_full = True
            logger.warning(
                "%s has no room for more KV cache rows (%s): new ones take the places of old ones; "
                "--kv-store-gb is more than the disk has",
                self._opened.path,
                error.strerror,
            )
        return error.errno == errno.EROFS or error.errno in NO_ROOM
