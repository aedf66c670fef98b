# SPDX-License-Identifier: Apache-2.0
"""Store of KV cache rows in a directory on a local disk.

Invariants: the index has exactly the slots whose records in memory are in use, and every other slot of this process's
segments is in `_free`. The order of the index is the order of use, and sequence numbers of records repeat it on disk.
One process writes to a directory of rows; others read, and see new rows at most REFRESH_S later. A writer in need of
room may take a segment away (`room.py`), so rows are written only under the lock of the files, which excludes that.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from quire.errors import ConfigError
from quire.kv_store.disk.encryption import OVERHEAD_BYTES, Sealer
from quire.kv_store.disk.files import NO_ROOM
from quire.kv_store.disk.namespaces import OpenNamespace, Root
from quire.kv_store.disk.room import keep_limit, make_room
from quire.kv_store.disk.segment import (
    DamagedSegmentError,
    Record,
    SegmentFile,
    SegmentLayout,
    segment_name,
)
from quire.kv_store.row_store import Namespace, Row, RowStoreError, RowStoreStats

logger = logging.getLogger(__name__)
SEGMENT_BYTES = 256 << 20
MAX_SEGMENTS = 128  # Open files of a store: with larger limits segments are larger.
MIN_SEGMENT_ROWS = 8
REFRESH_S = 0.5  # Well beyond a tick of the clock of files, see `Segment.refresh`.
LOCK_S = 1.0  # Other ranks grow at the same moment, each for some milliseconds.
GROW_AGAIN_S = 10.0  # Time after which a store that reached its limit checks whether others have room for it.
WRITE_AGAIN_S = 60.0  # Time after which a file system that was read-only is tried again.
_SLOTS = 1 << 32  # A place is segment number * _SLOTS + slot, so neighbouring slots are neighbouring places.


def open_disk_store(
    directory: Path, namespace: Namespace, max_bytes: int, key: bytes | None = None, *, beside: bool = False
) -> DiskStore:
    """Open the rows of a namespace in its first directory, as their writer if no other process is.

    Args:
        directory: directory of all namespaces; made if it is missing.
        namespace: what rows depend on beside their names.
        max_bytes: limit for all files below `directory`; `room.py` says whose rows give way to keep it.
        key: 32 bytes to encrypt rows with; None: rows are stored as they are.
        beside: write to a directory beside the first one if that has a writer. Engines do so (`shared.py`).

    Raises:
        ConfigError: the directory cannot be used, the limit has no room for a row, or the key does not fit the rows.
        RowStoreError: the disk does not work.
    """
    sealer = None if key is None else Sealer(key, namespace.digest)
    layout = _layout_of(namespace, sealer)
    if layout.num_slots_in(max_bytes) == 0:
        raise ConfigError(
            f"{max_bytes} bytes for the KV cache in {directory} have no room for one row; "
            f"give at least {layout.segment_bytes(1)} bytes"
        )
    root = Root(directory.absolute(), create=True)
    try:
        with _disk_errors(root.path), root.locked():
            fingerprint = sealer.fingerprint if sealer else None
            opened = (root.open_own if beside else root.open_namespace)(namespace, fingerprint)
            return DiskStore(root, opened, layout, max_bytes, sealer)
    except BaseException:
        root.close()
        raise


def open_rows_of(directory: Path, namespace: Namespace, name: str, key: bytes | None) -> DiskStore:
    """Open the rows in a directory of another writer, to read them only.

    Raises:
        ConfigError: it has gone, cannot be used, or has rows of another key.
        RowStoreError: the disk does not work.
    """
    sealer = None if key is None else Sealer(key, namespace.digest)
    root = Root(directory.absolute(), create=False)
    try:
        with _disk_errors(root.path):
            opened = root.open_namespace(namespace, sealer.fingerprint if sealer else None, name, write=False)
            return DiskStore(root, opened, _layout_of(namespace, sealer), 0, sealer)
    except BaseException:
        root.close()
        raise


def _layout_of(namespace: Namespace, sealer: Sealer | None) -> SegmentLayout:
    return SegmentLayout(namespace.digest, namespace.row_bytes + (OVERHEAD_BYTES if sealer else 0))


class DiskStore:
    """Rows of one namespace; see `RowStore` for its methods, and `open_disk_store` to make one."""

    finds_at_once = True
    medium = "DISK"

    def __init__(
        self, root: Root, opened: OpenNamespace, layout: SegmentLayout, max_bytes: int, sealer: Sealer | None
    ) -> None:
        self._root = root
        self._opened = opened
        self._layout = layout
        self._max_bytes = max_bytes
        self._sealer = sealer
        self._segments: dict[int, SegmentFile] = {}
        self._left_out: set[str] = set()  # files that are no segments of this namespace
        self._index: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # name on disk -> place, least recently used first
        self._free: list[int] = []  # heap of places
        self._sequence = 0
        self._removed: deque[bytes] = deque()
        self._sealed = memoryview(bytearray(layout.payload_bytes if sealer else 0))  # scratch of `_read`
        self._names: dict[bytes, bytes] = {}  # name on disk -> name, of encrypted rows that callers named
        self._num_corrupt = 0
        self._num_evicted = 0
        self._refreshing = threading.Lock()
        self._refreshed_at = time.monotonic()
        self._grow_at = 0.0
        self._read_only_until = 0.0
        self._replaced: list[SegmentFile] = []  # of a reader, not closed yet
        self._is_closed = False
        self.is_writable = opened.is_writer
        self.name = opened.name
        try:
            self._open_segments()
        except BaseException:
            self._close_files()
            raise

    def find(self, names: Sequence[bytes]) -> list[bool]:
        hidden = self._hidden(names)
        found = [name in self._index for name in hidden]
        if not self.is_writable and not all(found):
            self._refresh()
            found = [name in self._index for name in hidden]
        return found

    def read(self, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        hidden = self._hidden(names)
        with self._io():
            while self._replaced:
                self._replaced.pop().close()
            done = [self._read(name, row) for name, row in zip(hidden, rows, strict=True)]
            if self.is_writable:
                used = [name for name, was_read in zip(hidden, done, strict=True) if was_read]
                self._touch([name for name in used if name in self._index])  # its segment may be gone since
                self._flush()
        return done

    def touch(self, names: Sequence[bytes]) -> None:
        if self.is_writable:
            with self._io():
                self._touch([name for name in self._hidden(names) if name in self._index])
                self._flush()

    def write(self, names: Sequence[bytes], rows: Sequence[Row]) -> int:
        hidden = self._hidden(names)
        if self.is_writable:
            with self._io():
                self._drop_taken()
                # First, so that others are evicted before them.
                self._touch([name for name in hidden if name in self._index])
                rows_of = zip(hidden, rows, strict=True)
                self._write_new([one for one in rows_of if one[0] not in self._index], frozenset(hidden))
                self._touch([name for name in hidden if name in self._index])
                self._flush()
                self._remember(hidden, names)
        return sum(name in self._index for name in hidden)

    def remove(self, names: Sequence[bytes]) -> None:
        with self._io():
            for name in self._hidden(names):
                if name in self._index:
                    self._drop(name)
            self._flush()

    def names(self) -> list[bytes]:
        return list(self._index) if self._sealer is None else list(self._names.values())

    def directories(self) -> list[str]:
        """Return the names of all directories of this namespace.

        Raises:
            OSError: they cannot be listed.
        """
        return self._root.names_of(self._layout.digest)

    def pop_removed(self) -> list[bytes]:
        return [self._removed.popleft() for _ in range(len(self._removed))]

    def stats(self) -> RowStoreStats:
        return RowStoreStats(
            num_rows=len(self._index),
            num_bytes=len(self._index) * self._layout.stride,
            max_bytes=self._max_bytes,
            num_corrupt=self._num_corrupt,
            num_evicted=self._num_evicted,
        )

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._index.clear()
            self._close_files()
            self._root.close()

    # Opening

    def _open_segments(self) -> None:
        if self.is_writable:
            self._opened.remove_unfinished()
            keep_limit(self._root, self._opened, self._max_bytes)
        for number, file in self._opened.segment_files():
            self._open_segment(number, file)
        self._build_index()

    def _open_segment(self, number: int, file: str) -> bool:
        """Open a file; one that is no segment of this namespace is deleted by the writer, and left out by others."""
        try:
            segment = SegmentFile.open(
                self._opened.fd, file, self._layout, self._layout.digest, write=self.is_writable
            )
        except FileNotFoundError:  # deleted since it was listed
            return False
        except DamagedSegmentError as error:
            self._leave_out(file, str(error))
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ELOOP, errno.ENXIO):
                raise
            self._leave_out(file, str(error.strerror))
            return False
        self._segments[number] = segment
        return True

    def _leave_out(self, file: str, fault: str) -> None:
        logger.warning("the KV cache rows in %s are left out: %s", self._opened.path / file, fault)
        self._left_out.add(file)
        if self.is_writable:
            os.unlink(file, dir_fd=self._opened.fd)

    def _build_index(self) -> None:
        """Index all rows in their order of use; free all other slots."""
        names: list[bytes] = []
        places, sequences = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        for number, segment in self._segments.items():
            slots, uses = segment.in_use()
            names += segment.names(slots)
            places.append(number * _SLOTS + slots)
            sequences.append(uses)
        all_uses = np.concatenate(sequences)
        place_of = np.concatenate(places).tolist()
        self._index.update((names[at], place_of[at]) for at in np.argsort(all_uses).tolist())
        if self.is_writable:
            self._sequence = int(all_uses.max(initial=0))
            self._free_others()

    def _free_others(self) -> None:
        """Free slots that no row of the index has; those that are not free yet are damaged."""
        used = set(self._index.values())
        for number, segment in self._segments.items():
            free = [slot for slot in range(segment.num_slots) if number * _SLOTS + slot not in used]
            self._num_corrupt += segment.free(free)
            self._free += [number * _SLOTS + slot for slot in free]
        heapq.heapify(self._free)

    # Reading

    def _read(self, name: bytes, row: Row) -> bool:
        """Fill a row; a damaged one is dropped."""
        place = self._index.get(name)
        if place is None:
            return False
        segment, slot = self._segments[place // _SLOTS], place % _SLOTS
        if self._sealer is None:
            done = segment.read(slot, name, row)
        else:
            done = segment.read(slot, name, [self._sealed]) and self._sealer.open(name, self._sealed, row)
        if not done:
            self._drop_damaged(segment, slot, name)
        return done

    def _drop_damaged(self, segment: SegmentFile, slot: int, name: bytes) -> None:
        """Drop a row, and count it unless its room was taken or the writer has used its slot since the last refresh."""
        if self.is_writable and segment.is_taken():
            self._drop_taken()
            return
        known = segment.record(slot)
        if known is not None and known.name == name:
            self._num_corrupt += self.is_writable or segment.reread(slot) == known
        self._drop(name)

    def _refresh(self) -> None:
        """Index what the writer has changed since the last time, at most once in REFRESH_S.

        Files that were deleted meanwhile stay open, and readable unless their room was taken.
        """
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
        for name, place in zip(former.names(slots), (number * _SLOTS + slots).tolist(), strict=True):
            if self._index.get(name) == place:
                self._lose(name)
        self._replaced.append(former)

    def _index_segment(self, number: int) -> None:
        slots, _ = self._segments[number].in_use()
        names = self._segments[number].names(slots)
        self._index.update(zip(names, (number * _SLOTS + slots).tolist(), strict=True))

    def _index_changes(self, number: int) -> None:
        segment = self._segments[number]
        for slot, former in segment.refresh():
            place, now = number * _SLOTS + slot, segment.record(slot)
            if now is not None:
                self._index[now.name] = place
            was_replaced = former is not None and (now is None or now.name != former.name)
            if former is not None and was_replaced and self._index.get(former.name) == place:
                self._lose(former.name)

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
            segment, slot = self._segments[place // _SLOTS], place % _SLOTS
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
        self._free += range(number * _SLOTS, number * _SLOTS + num_slots)
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
        for name in [name for name, place in self._index.items() if place // _SLOTS in taken]:
            del self._index[name]
            self._removed.extend(self._names_of(name))
            self._num_evicted += 1
        self._free = [place for place in self._free if place // _SLOTS not in taken]
        heapq.heapify(self._free)
        for number in taken:
            self._segments.pop(number).close()

    def _drop(self, name: bytes) -> None:
        """Remove a row; a reader leaves its slot to the writer."""
        if self.is_writable:
            heapq.heappush(self._free, self._forget(name))
        else:
            self._lose(name)

    def _lose(self, name: bytes) -> None:
        """Remove a row from a reader's index, which two threads change."""
        if self._index.pop(name, None) is not None:
            self._removed.extend(self._names_of(name))

    def _forget(self, name: bytes) -> int:
        """Remove a row and free its record; returns its place."""
        place = self._index.pop(name)
        self._segments[place // _SLOTS].free([place % _SLOTS])
        self._removed.extend(self._names_of(name))
        return place

    def _touch(self, names: Sequence[bytes]) -> None:
        """Make rows the most recently used ones, the first of them last."""
        for name in reversed(names):
            self._index.move_to_end(name)
            place = self._index[name]
            self._segments[place // _SLOTS].touch(place % _SLOTS, self._next_sequence())

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
        return error.errno == errno.EROFS or error.errno in NO_ROOM

    # Names and files

    def _hidden(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """Return the names of rows on disk."""
        if self._sealer is None:
            return names
        hidden = [self._sealer.hide(name) for name in names]
        self._remember(hidden, names)
        return hidden

    def _remember(self, hidden: Sequence[bytes], names: Sequence[bytes]) -> None:
        if self._sealer is not None:
            stored = zip(hidden, names, strict=True)
            self._names |= {name: given for name, given in stored if name in self._index}

    def _names_of(self, hidden: bytes) -> list[bytes]:
        """Return the name of a removed row, unless it is encrypted and no caller has named it."""
        if self._sealer is None:
            return [hidden]
        name = self._names.pop(hidden, None)
        return [] if name is None else [name]

    @contextmanager
    def _io(self) -> Iterator[None]:
        if self._is_closed:
            raise RowStoreError("the KV cache on disk is closed")
        with _disk_errors(self._opened.path):
            yield

    def _close_files(self) -> None:
        for segment in [*self._segments.values(), *self._replaced]:
            segment.close()
        self._segments.clear()
        self._replaced.clear()
        self._opened.close()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RowStoreError(f"the KV cache in {path} does not work: {error.strerror or error}") from error
