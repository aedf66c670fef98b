# SPDX-License-Identifier: Apache-2.0
"""Namespaces, names and rows for tests of the disk store."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.kv_store.disk.opening import open_disk_store
from quire.kv_store.disk.segment import SegmentLayout
from quire.kv_store.disk.store import DiskStore
from quire.kv_store.row_store import NAME_BYTES, Namespace

ROW_BYTES = 3 * 700
NAMESPACE = Namespace({"model": "m", "dtype": "bfloat16"}, ROW_BYTES)
OTHER = Namespace({"model": "other", "dtype": "bfloat16"}, ROW_BYTES)
KEY = bytes(range(32))


def name_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() + bytes(NAME_BYTES - 32)


def content_of(number: int, size: int = ROW_BYTES) -> bytes:
    return hashlib.shake_128(b"row %d" % number).digest(size)


def row_of(content: bytes, pieces: int = 3) -> list[memoryview]:
    """A row of parts that are no neighbors in memory."""
    size = len(content) // pieces
    return [memoryview(bytearray(content[at : at + size])) for at in range(0, len(content), size)]


def blank(size: int = ROW_BYTES) -> list[memoryview]:
    return row_of(bytes(size))


def bytes_of(row: list[memoryview]) -> bytes:
    return b"".join(row)


def limit_of(*num_slots: int, row_bytes: int = ROW_BYTES) -> int:
    """Limit with room for segments of so many slots."""
    layout = SegmentLayout("0" * 32, row_bytes)
    return sum(layout.segment_bytes(count) for count in num_slots)


def opened(
    directory: Path, num_rows: int = 20, namespace: Namespace = NAMESPACE, **options: object
) -> DiskStore:
    """A store with room for so many rows in one segment, if there are no more than 8 or it is the first."""
    return open_disk_store(directory, namespace, limit_of(num_rows), **options)  # type: ignore[arg-type]


def write(store: DiskStore, *numbers: int) -> int:
    return store.write(
        [name_of(number) for number in numbers], [row_of(content_of(number)) for number in numbers]
    )


def read(store: DiskStore, *numbers: int) -> list[bool]:
    """Read rows, check that each has the bytes that were written, and return which ones were found."""
    rows = [blank() for _ in numbers]
    done = store.read([name_of(number) for number in numbers], rows)
    for number, row, was_read in zip(numbers, rows, done, strict=True):
        assert not was_read or bytes_of(row) == content_of(number)
    return done


def held(store: DiskStore, count: int = 60) -> list[int]:
    """The numbers below `count` that the store finds."""
    return [number for number, found in enumerate(store.find([name_of(n) for n in range(count)])) if found]
