# SPDX-License-Identifier: Apache-2.0
"""Rows of one namespace in a directory on a local disk: what their reader and their writer have in common.

Invariants: the index has exactly the slots whose records in memory are in use. Its order is the order of use, and
sequence numbers of records repeat it on disk. One process writes to a directory of rows (`writer.py`); others read
(`reader.py`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np

from quire.kv_store.disk.encryption import Sealer
from quire.kv_store.disk.files import NO_FILE
from quire.kv_store.disk.namespaces import OpenNamespace, Root
from quire.kv_store.disk.segment import DamagedSegmentError, SegmentFile, SegmentLayout
from quire.kv_store.row_store import Row, RowStoreError, RowStoreStats

logger = logging.getLogger(__name__)
SLOTS = 1 << 32  # A place is segment number * SLOTS + slot, so neighboring slots are neighboring places.


class DiskStore(ABC):
    """Rows of one namespace; see `RowStore` for its methods, and `opening.py` to make one. `open` comes first."""

    finds_at_once = True
    medium = "DISK"
    is_writable: bool

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
        # Name on disk -> place, least recently used first.
        self._index: OrderedDict[bytes, int] = OrderedDict()
        self._sequence = 0  # the largest one
        self._removed: deque[bytes] = deque()
        self._sealed = memoryview(bytearray(layout.payload_bytes if sealer else 0))  # scratch of `_read`
        self._names: dict[bytes, bytes] = {}  # name on disk -> name, of encrypted rows that callers named
        self._num_corrupt = 0
        self._num_evicted = 0
        self._is_closed = False
        self.name = opened.name

    def open(self) -> Self:
        """Open the files and index their rows.

        Raises:
            OSError: the disk does not work; nothing stays open but the root.
        """
        try:
            self._open_segments()
        except BaseException:
            self._close_files()
            raise
        return self

    def find(self, names: Sequence[bytes]) -> list[bool]:
        return [name in self._index for name in self._hidden(names)]

    @abstractmethod
    def read(self, names: Sequence[bytes], rows: Sequence[Row]) -> list[bool]: ...

    @abstractmethod
    def touch(self, names: Sequence[bytes]) -> None: ...

    @abstractmethod
    def write(self, names: Sequence[bytes], rows: Sequence[Row]) -> int: ...

    def remove(self, names: Sequence[bytes]) -> None:
        with self._io():
            for name in self._hidden(names):
                if name in self._index:
                    self._drop(name)

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
        for number, file in self._opened.segment_files():
            self._open_segment(number, file)
        self._build_index()

    def _open_segment(self, number: int, file: str) -> bool:
        """Open a file; one that is no segment of this namespace is left out."""
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
            if error.errno not in NO_FILE:
                raise
            self._leave_out(file, str(error.strerror))
            return False
        self._segments[number] = segment
        return True

    def _leave_out(self, file: str, fault: str) -> None:
        logger.warning("the KV cache rows in %s are left out: %s", self._opened.path / file, fault)
        self._left_out.add(file)

    def _build_index(self) -> None:
        """Index all rows in their order of use."""
        names: list[bytes] = []
        places, sequences = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        for number, segment in self._segments.items():
            slots, uses = segment.in_use()
            names += segment.names(slots)
            places.append(number * SLOTS + slots)
            sequences.append(uses)
        all_uses = np.concatenate(sequences)
        place_of = np.concatenate(places).tolist()
        self._index.update((names[at], place_of[at]) for at in np.argsort(all_uses).tolist())
        self._sequence = int(all_uses.max(initial=0))

    # Reading

    def _read_all(self, hidden: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Fill rows by their names on disk."""
        return [self._read(name, row) for name, row in zip(hidden, rows, strict=True)]

    def _read(self, name: bytes, row: Row) -> bool:
        """Fill a row; a damaged one is dropped."""
        place = self._index.get(name)
        if place is None:
            return False
        segment, slot = self._segments[place // SLOTS], place % SLOTS
        if self._sealer is None:
            done = segment.read(slot, name, row)
        else:
            done = segment.read(slot, name, [self._sealed]) and self._sealer.open(name, self._sealed, row)
        if not done:
            self._drop_damaged(segment, slot, name)
        return done

    @abstractmethod
    def _drop_damaged(self, segment: SegmentFile, slot: int, name: bytes) -> None:
        """Drop a row that was not read, and count it if it is damaged."""

    @abstractmethod
    def _drop(self, name: bytes) -> None:
        """Remove a row."""

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
        with disk_errors(self._opened.path):
            yield

    def _close_files(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._opened.close()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RowStoreError(f"the KV cache in {path} does not work: {error.strerror or error}") from error
