# SPDX-License-Identifier: Apache-2.0
"""Checksums of slots are those of one name in one namespace."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from quire.kv_store.disk.segment import PAGE, Record, SegmentFile, SegmentLayout
from tests.kv_store.disk.rows import NAMESPACE, OTHER, ROW_BYTES, blank, content_of, name_of, row_of


def test_payload_under_another_name_is_not_read(tmp_path: Path) -> None:
    layout = SegmentLayout(NAMESPACE.digest, ROW_BYTES)
    directory = os.open(tmp_path, os.O_RDONLY)
    segment = SegmentFile.create(directory, "00000001.rows", layout, 8)
    checksum = segment.write(0, name_of(1), row_of(content_of(1)))
    segment.set(0, Record(name_of(1), 1, checksum))
    assert segment.read(0, name_of(1), blank())
    segment.set(0, Record(name_of(2), 2, checksum))
    assert not segment.read(0, name_of(2), blank())
    segment.close()
    os.close(directory)


def test_checksums_of_another_namespace_differ() -> None:
    mine, other = (SegmentLayout(namespace.digest, ROW_BYTES) for namespace in (NAMESPACE, OTHER))
    row = row_of(content_of(1))
    assert mine.payload_checksum(name_of(1), row) != other.payload_checksum(name_of(1), row)
    assert mine.record_checksum(bytes(60)) != other.record_checksum(bytes(60))


@given(payload_bytes=st.integers(1, 3 * PAGE), num_bytes=st.integers(0, 1 << 22))
def test_number_of_slots_is_the_largest_that_fits(payload_bytes: int, num_bytes: int) -> None:
    layout = SegmentLayout(NAMESPACE.digest, payload_bytes)
    num_slots = layout.num_slots_in(num_bytes)
    assert num_slots == 0 or layout.segment_bytes(num_slots) <= num_bytes
    assert layout.segment_bytes(num_slots + 1) > num_bytes
