# SPDX-License-Identifier: Apache-2.0
"""Maintenance of a directory of KV cache rows beside the engines that use it: list, check, shrink.

A namespace whose writer is running is only read. While a namespace without one is checked, this process holds its lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from quire.kv_store.disk.files import NO_FILE
from quire.kv_store.disk.namespaces import OpenNamespace, Root
from quire.kv_store.disk.room import discard_oldest
from quire.kv_store.disk.segment import DamagedSegmentError, SegmentFile


class NamespaceState(msgspec.Struct, frozen=True):
    """One namespace; `num_bytes` is what its files take up when they are full, `last_use` seconds since the epoch."""

    digest: str
    values: dict[str, str]
    row_bytes: int
    is_encrypted: bool
    num_rows: int
    num_bytes: int
    last_use: float
    is_in_use: bool


class NamespaceCheck(msgspec.Struct):
    """Check of one namespace; `is_repaired`: what was damaged is gone, as no process writes to the namespace."""

    digest: str
    num_rows: int = 0
    num_damaged_rows: int = 0
    damaged_files: list[str] = []
    is_repaired: bool = False


class Collected(msgspec.Struct, frozen=True):
    """Bytes that are left after a collection, and namespaces that it left alone because they are in use."""

    num_bytes: int
    skipped: list[str]


def list_namespaces(directory: Path) -> list[NamespaceState]:
    """Return all namespaces, most recently used first.

    Raises:
        ConfigError: the directory, or a namespace in it, cannot be opened.
        OSError: the disk does not work.
    """
    with _root(directory) as root, root.locked():
        states = [_state(root, digest) for digest in root.digests()]
    return sorted(states, key=lambda state: state.last_use, reverse=True)


def check_namespaces(directory: Path, count: Callable[[int], object]) -> Iterator[NamespaceCheck]:
    """Read every row, and yield the result of each namespace; `count` is called with the number of rows read.

    Raises:
        ConfigError: the directory, or a namespace in it, cannot be opened.
        OSError: the disk does not work.
    """
    with _root(directory) as root:
        with root.locked():
            digests = root.digests()
        for digest in digests:
            with root.locked():
                opened = root.open_existing(digest)
            try:
                yield _check(opened, count)
            finally:
                opened.close()


def collect(directory: Path, max_bytes: int) -> Collected:
    """Delete the least recently used namespaces, and segments of the last one, until the rest fits.

    Raises:
        ConfigError: the directory cannot be opened.
        OSError: the disk does not work.
    """
    skipped = []
    with _root(directory) as root, root.locked():
        sizes = {digest: root.num_bytes(digest) for digest in root.digests()}
        total = sum(sizes.values())
        for digest in root.oldest_first(sizes):
            if total <= max_bytes:
                break
            freed = _shrink(root, digest, sizes[digest], total - max_bytes)
            if freed is None:
                skipped.append(digest)
            else:
                total -= freed
    return Collected(total, skipped)


@contextmanager
def _root(directory: Path) -> Iterator[Root]:
    root = Root(directory.absolute(), create=False)
    try:
        yield root
    finally:
        root.close()


@contextmanager
def _segment(opened: OpenNamespace, file: str) -> Iterator[SegmentFile | None]:
    """Open a segment; None if its header is damaged, or if it is no file of this user."""
    try:
        segment = SegmentFile.open(opened.fd, file, None, opened.digest, write=opened.is_writer)
    except DamagedSegmentError:
        yield None
        return
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        yield None
        return
    try:
        yield segment
    finally:
        segment.close()


def _state(root: Root, digest: str) -> NamespaceState:
    opened = root.open_existing(digest)
    try:
        manifest = opened.manifest()
        num_rows = 0
        for _, file in opened.segment_files():
            with _segment(opened, file) as segment:
                num_rows += len(segment.in_use()[0]) if segment else 0
    finally:
        opened.close()
    return NamespaceState(
        digest=digest,
        values=manifest.values if manifest else {},
        row_bytes=manifest.row_bytes if manifest else 0,
        is_encrypted=manifest is not None and manifest.key is not None,
        num_rows=num_rows,
        num_bytes=root.num_bytes(digest),
        last_use=root.last_use(digest),
        is_in_use=not opened.is_writer,
    )


def _check(opened: OpenNamespace, count: Callable[[int], object]) -> NamespaceCheck:
    result = NamespaceCheck(opened.name, is_repaired=opened.is_writer)
    for _, file in opened.segment_files():
        with _segment(opened, file) as segment:
            if segment is not None:
                _check_segment(segment, result, count)
                continue
        result.damaged_files.append(file)
        if opened.is_writer:
            os.unlink(file, dir_fd=opened.fd)
    return result


def _check_segment(segment: SegmentFile, result: NamespaceCheck, count: Callable[[int], object]) -> None:
    slots = segment.in_use()[0].tolist()
    damaged = []
    for slot in slots:
        if not _is_whole(segment, slot):
            damaged.append(slot)
        count(1)
    result.num_rows += len(slots)
    used = set(slots)
    others = [slot for slot in range(segment.num_slots) if slot not in used and not segment.is_free(slot)]
    result.num_damaged_rows += len(damaged) + len(others)
    if result.is_repaired:
        segment.free(damaged + others)
        segment.flush()


def _is_whole(segment: SegmentFile, slot: int) -> bool:
    """Read a row, again if its slot was reused meanwhile; a slot that was freed is whole."""
    payload = memoryview(bytearray(segment.payload_bytes))
    record = segment.record(slot)
    while record is not None:
        if segment.read_payload(slot, record, payload):
            return True
        now = segment.reread(slot)
        if now is not None and (now.name, now.checksum) == (record.name, record.checksum):
            return False
        record = now
    return True


def _shrink(root: Root, digest: str, size: int, excess: int) -> int | None:
    """Delete a namespace, or only so many of its segments; returns the bytes that are free then, None: it is in use."""
    if excess >= size:
        return size if root.delete(digest) else None
    with root.opened(digest) as folder:
        return discard_oldest(folder, excess) if folder is not None and folder.is_writer else None
