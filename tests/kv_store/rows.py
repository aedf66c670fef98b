# SPDX-License-Identifier: Apache-2.0
"""Rows whose content follows from a number, in parts of unequal size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from quire.kv_store.row_store import NAME_BYTES


def name_of(number: int) -> bytes:
    return hashlib.shake_256(b"name %d" % number).digest(NAME_BYTES)


def content_of(number: int, row_bytes: int) -> bytes:
    return hashlib.shake_256(b"row %d" % number).digest(row_bytes)


def parts_of(content: bytearray) -> list[memoryview]:
    """Views of one buffer: one byte, none, a third, the rest."""
    view, third = memoryview(content), 1 + (len(content) - 1) // 3
    return [view[:1], view[1:1], view[1:third], view[third:]]


def rows_of(numbers: Sequence[int], row_bytes: int) -> list[list[memoryview]]:
    return [parts_of(bytearray(content_of(number, row_bytes))) for number in numbers]


def empty_rows(num_rows: int, row_bytes: int) -> list[list[memoryview]]:
    return [parts_of(bytearray(row_bytes)) for _ in range(num_rows)]
