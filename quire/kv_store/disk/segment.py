# SPDX-License-Identifier: Apache-2.0
"""Files of fixed-size slots, each for one row.

    header        4 KiB: magic, version, number of slots, bytes of a payload, digest of the namespace, checksum
    records       64 bytes each: name, sequence number of the last use, checksum of the payload, checksum of the record
    payloads      one for each record, aligned to 4 KiB; sparse until they are written

A record with sequence number 0 is free. A slot is written in three steps: free its record, write its payload, write
its record. A process that is killed between two of them leaves a free slot. After a power loss any of these pages may
be old or new, so nothing is fsynced, and nothing is believed without its checksum: checksums cover the namespace and
the name beside the bytes, so an old, exchanged or half-written slot is a miss.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from quire.errors import QuireError
from quire.kv_store.disk.files import open_file, transfer, transfer_bytes
from quire.kv_store.row_store import NAME_BYTES

VERSION = 1
PAGE = 4096
SUFFIX = ".rows"
_MAGIC = b"QUIREKV\n"
_HEADER = struct.Struct("<8sIIQ32s")
_HEADER_CHECKSUM = struct.Struct("<Q")
_RECORD = struct.Struct(f"<{NAME_BYTES}sQ16sI")
_RECORD_TYPE = np.dtype(
    [("name", f"V{NAME_BYTES}"), ("sequence", "<u8"), ("checksum", "V16"), ("own", "<u4")]
)
_SEQUENCE = struct.Struct("<Q")
_RECORD_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AT = NAME_BYTES + _SEQUENCE.size
_FREE = bytes(_RECORD.size)
_NUM_CHECKED = _RECORD.size - 4  # bytes of a record before its checksum
_MAX_SEQUENCE = 1 << 62  # what damage makes of a number must not leave the counter without room
assert _RECORD.size == 64


class DamagedSegmentError(QuireError):
    """File whose header is not that of a segment of its namespace."""


class Record(NamedTuple):
    """State of a slot; `sequence` orders uses and is 0 for a free slot."""

    name: bytes
    sequence: int
    checksum: bytes


class SegmentLayout(msgspec.Struct, frozen=True):
    """Sizes and checksums of the segments of one namespace.

    Args:
        digest: 32 hexadecimal digits of the namespace.
        payload_bytes: size of a row as it is stored.
    """

    digest: str
    payload_bytes: int

    @property
    def seed(self) -> int:
        """Return the seed that binds the checksums of records to the namespace."""
        return int(self.digest[:16], 16)

    @property
    def stride(self) -> int:
        """Distance of payloads in bytes."""
        return _up_to_page(self.payload_bytes)

    def payloads_at(self, num_slots: int) -> int:
        """Return the offset of the first payload in bytes."""
        return PAGE + _up_to_page(num_slots * _RECORD.size)

    def segment_bytes(self, num_slots: int) -> int:
        """Return the size of a file."""
        return self.payloads_at(num_slots) + num_slots * self.stride

    def num_slots_in(self, num_bytes: int) -> int:
        """Return how many slots a file of at most so many bytes has; 0 if there is no room for one."""
        num_slots = max(0, num_bytes - PAGE) // (self.stride + _RECORD.size)
        while num_slots > 0 and self.segment_bytes(num_slots) > num_bytes:
            num_slots -= 1
        return num_slots

    def header(self, num_slots: int) -> bytes:
        """Return the beginning of a file."""
        packed = _HEADER.pack(_MAGIC, VERSION, num_slots, self.payload_bytes, self.digest.encode())
        return packed + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))

    def payload_checksum(self, name: bytes, parts: Sequence[memoryview]) -> bytes:
        """Return the 16 bytes that a payload and its name must have in its record."""
        state = xxhash.xxh3_128(self.digest.encode() + name)
        for part in parts:
            state.update(part)
        return state.digest()

    def decode(self, packed: bytes) -> Record | None:
        """Return a record, None if it is free or damaged."""
        name, sequence, checksum, own = _RECORD.unpack(packed)
        if 0 < sequence < _MAX_SEQUENCE and own == self.record_checksum(packed[:_NUM_CHECKED]):
            return Record(name, sequence, checksum)
        return None

    def record_checksum(self, packed: bytes | memoryview) -> int:
        """Return the last 4 bytes of a record, for those before them."""
        return xxhash.xxh3_64_intdigest(packed, self.seed) & 0xFFFFFFFF


class SegmentFile:
    """One open file with a copy of its records in memory.

    Invariant: changed records are in `_changed` until the file has them too.

    Attributes:
        num_slots: number of slots.
        size: bytes that the file takes up when it is full.
    """

    def __init__(self, fd: int, layout: SegmentLayout, num_slots: int) -> None:
        self._fd = fd
        self._layout = layout
        self._records = bytearray(num_slots * _RECORD.size)
        self._changed: set[int] = set()
        self._seen: tuple[int, int] | None = None
        self._settled = False
        self.num_slots = num_slots
        self.size = layout.segment_bytes(num_slots)
        self._payloads_at = layout.payloads_at(num_slots)

    @classmethod
    def create(cls, directory: int, name: str, layout: SegmentLayout, num_slots: int) -> SegmentFile:
        """Make a file of free slots, which other processes see only when its header is complete.

        Raises:
            OSError: the disk refuses it; nothing is left of it.
        """
        unfinished = f"{name}.new"
        fd = open_file(directory, unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            transfer_bytes(os.pwritev, fd, layout.header(num_slots), 0)
            os.ftruncate(fd, layout.segment_bytes(num_slots))
            os.rename(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            os.close(fd)
            os.unlink(unfinished, dir_fd=directory)
            raise
        return cls(fd, layout, num_slots)

    @classmethod
    def open(
        cls, directory: int, name: str, layout: SegmentLayout | None, digest: str, *, write: bool
    ) -> SegmentFile:
        """Open a file and read its records; without a layout that of the header is taken.

        Raises:
            DamagedSegmentError: the header is not that of a segment of this namespace.
            OSError: the file cannot be read.
        """
        fd = open_file(directory, name, os.O_RDWR if write else os.O_RDONLY)
        try:
            found, num_slots = _read_header(fd, digest)
            if layout not in (None, found):
                raise DamagedSegmentError(f"its payloads have {found.payload_bytes} bytes")
            segment = cls(fd, found, num_slots)
            segment._load()
        except (OSError, DamagedSegmentError):
            os.close(fd)
            raise
        return segment

    def refresh(self) -> list[tuple[int, Record | None]]:
        """Read the records again if the file was changed; returns the slots that differ, with their former records.

        Times of files are coarse: a write soon after this may leave the time as it is, so the records are read once
        more after the first call that finds the same time. Calls must be farther apart than a tick of the clock.

        Raises:
            OSError: the file cannot be read.
        """
        former = self._records
        if not self._load() or former == self._records:
            return []
        fresh, size = self._records, _RECORD.size
        changed = (at for at in range(0, len(fresh), size) if fresh[at : at + size] != former[at : at + size])
        return [(at // size, self._layout.decode(bytes(former[at : at + size]))) for at in changed]

    def _load(self) -> bool:
        """Read the records unless the file is as it was; returns whether they were read."""
        status = os.fstat(self._fd)
        seen = (status.st_mtime_ns, status.st_size)
        if seen == self._seen and self._settled:
            return False
        self._settled, self._seen = seen == self._seen, seen
        records = bytearray(len(self._records))
        if status.st_size > PAGE:
            transfer_bytes(os.preadv, self._fd, records, PAGE)
        self._records = records  # at once, since another thread may be reading rows
        return True

    def record(self, slot: int) -> Record | None:
        """Return what the slot holds; None: free or damaged."""
        return self._layout.decode(self._packed(slot))

    def is_free(self, slot: int) -> bool:
        return self._packed(slot) == _FREE

    def in_use(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the slots in use, in order, and their sequence numbers.

        Slots whose payload would be behind the end of the file are left out.
        """
        packed = memoryview(bytes(self._records))
        records = np.frombuffer(packed, _RECORD_TYPE, self._num_slots_in_file())
        sequences = records["sequence"]
        slots = np.flatnonzero((sequences > 0) & (sequences < _MAX_SEQUENCE))
        checksum_of, seed = xxhash.xxh3_64_intdigest, self._layout.seed
        starts = (slots * _RECORD.size).tolist()
        found = [checksum_of(packed[at : at + _NUM_CHECKED], seed) & 0xFFFFFFFF for at in starts]
        slots = slots[records["own"][slots] == np.array(found, dtype=np.uint32)]
        return slots, sequences[slots]

    def names(self, slots: NDArray[np.int64]) -> list[bytes]:
        """Return the names of slots in use."""
        packed = bytes(self._records)
        return [packed[at : at + NAME_BYTES] for at in (slots * _RECORD.size).tolist()]

    def last_use(self) -> int:
        """Return the largest sequence number."""
        return int(self.in_use()[1].max(initial=0))

    def set(self, slot: int, record: Record) -> None:
        """Change a record, in memory until the next `flush`."""
        _RECORD.pack_into(self._records, slot * _RECORD.size, *record, 0)
        self.touch(slot, record.sequence)

    def touch(self, slot: int, sequence: int) -> None:
        """Change the sequence number of a record in the same way."""
        at = slot * _RECORD.size
        _SEQUENCE.pack_into(self._records, at + NAME_BYTES, sequence)
        own = self._layout.record_checksum(memoryview(self._records)[at : at + _NUM_CHECKED])
        _RECORD_CHECKSUM.pack_into(self._records, at + _NUM_CHECKED, own)
        self._changed.add(slot)

    def free(self, slots: Iterable[int]) -> int:
        """Free the records of slots in the same way; returns how many were not free."""
        used = [slot for slot in slots if not self.is_free(slot)]
        for slot in used:
            self._records[slot * _RECORD.size : (slot + 1) * _RECORD.size] = _FREE
        self._changed.update(used)
        return len(used)

    def flush(self) -> None:
        """Write changed records, neighbors at once.

        Raises:
            OSError: the disk refuses it; what was not written stays changed.
        """
        for start, end in _runs(sorted(self._changed)):
            packed = memoryview(self._records)[start * _RECORD.size : end * _RECORD.size]
            transfer_bytes(os.pwritev, self._fd, packed, PAGE + start * _RECORD.size)
            self._changed.difference_update(range(start, end))

    def read(self, slot: int, name: bytes, parts: Sequence[memoryview]) -> bool:
        """Fill the parts of a payload; False: they do not have the bytes that were written under this name.

        Raises:
            OSError: the disk does not work.
        """
        at = slot * _RECORD.size + _CHECKSUM_AT
        return self._read(slot, name, parts, self._records[at : at + 16])

    def read_payload(self, slot: int, record: Record, payload: memoryview) -> bool:
        """Do the same with the checksum of a given record."""
        return self._read(slot, record.name, [payload], record.checksum)

    def _read(self, slot: int, name: bytes, parts: Sequence[memoryview], checksum: bytes | bytearray) -> bool:
        length = transfer(os.preadv, self._fd, parts, self._layout.payload_bytes, self._payload_at(slot))
        whole = length == self._layout.payload_bytes
        return whole and self._layout.payload_checksum(name, parts) == checksum

    def write(self, slot: int, name: bytes, parts: Sequence[memoryview]) -> bytes:
        """Write a payload; returns its checksum for the record, which must be free on disk.

        Raises:
            OSError: the disk refuses it.
        """
        checksum = self._layout.payload_checksum(name, parts)
        transfer(os.pwritev, self._fd, parts, self._layout.payload_bytes, self._payload_at(slot))
        return checksum

    def reread(self, slot: int) -> Record | None:
        """Read one record again, which another process may have changed.

        Raises:
            OSError: the disk does not work.
        """
        packed = bytearray(_RECORD.size)
        transfer_bytes(os.preadv, self._fd, packed, PAGE + slot * _RECORD.size)
        return self._layout.decode(bytes(packed))

    def is_taken(self) -> bool:
        """Return whether another writer has taken the file's room: it is deleted and cut.

        Raises:
            OSError: the disk does not work.
        """
        status = os.fstat(self._fd)
        return status.st_nlink == 0 and status.st_size < self.size

    def is_replaced(self, directory: int, name: str) -> bool:
        """Return whether the file's name is another file's by now.

        Raises:
            OSError: the disk does not work.
        """
        try:
            there = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return not os.path.samestat(there, os.fstat(self._fd))

    def close(self) -> None:
        os.close(self._fd)

    @property
    def payload_bytes(self) -> int:
        return self._layout.payload_bytes

    def _packed(self, slot: int) -> bytes:
        return bytes(self._records[slot * _RECORD.size : (slot + 1) * _RECORD.size])

    def _payload_at(self, slot: int) -> int:
        return self._payloads_at + slot * self._layout.stride

    def _num_slots_in_file(self) -> int:
        if self._seen is None:  # just created
            return self.num_slots
        in_file = self._seen[1] - self._payloads_at + self._layout.stride - self._layout.payload_bytes
        return max(0, min(self.num_slots, in_file // self._layout.stride))


def segment_number(name: str) -> int | None:
    """Return the number of a segment's file name, None if it is another file's."""
    digits = name.removesuffix(SUFFIX)
    return (
        int(digits) if digits != name and len(digits) == 8 and digits.isascii() and digits.isdigit() else None
    )


def segment_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"{number:08d}{SUFFIX}"


def _read_header(fd: int, digest: str) -> tuple[SegmentLayout, int]:
    """Return the layout and the number of slots that a file's header says.

    Raises:
        DamagedSegmentError: see `SegmentFile.open`.
    """
    packed = bytearray(_HEADER.size + _HEADER_CHECKSUM.size)
    transfer_bytes(os.preadv, fd, packed, 0)
    magic, version, num_slots, payload_bytes, stored = _HEADER.unpack_from(packed)
    if magic != _MAGIC:
        raise DamagedSegmentError("it does not begin as a segment does")
    if version != VERSION:
        raise DamagedSegmentError(f"it has version {version}, this quire reads version {VERSION}")
    if stored != digest.encode():
        raise DamagedSegmentError("it belongs to another namespace")
    layout = SegmentLayout(digest, payload_bytes)
    if packed != layout.header(num_slots):
        raise DamagedSegmentError("the checksum of its header is wrong")
    return layout, num_slots


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last + 1 of each run of neighbors among ascending numbers."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield slots[start], slots[index - 1] + 1
            start = index


def _up_to_page(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
