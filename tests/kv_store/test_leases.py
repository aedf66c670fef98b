# SPDX-License-Identifier: Apache-2.0
"""Leased rows: kept as long as a lease holds them, bounded, and gone within a second of its end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from quire.kv_store import leases
from quire.kv_store.leases import LeasedRows
from quire.kv_store.memory import ROW_OVERHEAD_BYTES
from quire.kv_store.row_store import Row

ROW_BYTES = 16
A, B = b"a" * 36, b"b" * 36


def name(number: int) -> bytes:
    return bytes([number]) * 36


def row(number: int) -> Row:
    return [memoryview(bytearray([number] * 4)), memoryview(bytearray([number] * 12))]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rows(clock: Clock) -> Iterator[LeasedRows]:
    kept = LeasedRows(4 * (ROW_BYTES + ROW_OVERHEAD_BYTES), 10.0, clock)
    yield kept
    kept.shut_down()


def content(rows: LeasedRows, number: int) -> bytes | None:
    target = memoryview(bytearray(ROW_BYTES))
    return bytes(target) if rows.read([name(number)], [[target]]) == [True] else None


def test_rows_are_read_until_their_lease_is_removed(rows: LeasedRows) -> None:
    assert rows.offer(A, [name(1), name(2)], [row(1), row(2)]) == [True, True]
    assert rows.find([name(1), name(3), A]) == [True, False, True]
    assert content(rows, 1) == bytes([1] * ROW_BYTES)
    rows.remove([A])
    assert content(rows, 1) is None
    assert rows.stats().num_bytes == 0
    rows.remove([A])


def test_a_row_of_two_leases_stays_until_both_end(rows: LeasedRows) -> None:
    rows.offer(A, [name(1), name(2)], [row(1), row(2)])
    rows.offer(B, [name(1)], [row(1)])
    rows.remove([A])
    assert rows.find([name(1), name(2)]) == [True, False]
    rows.remove([B])
    assert rows.stats().num_rows == 0


def test_leases_are_renewed_but_not_for_ever(
    rows: LeasedRows, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MOST_LIFE_S", 25.0)
    rows.offer(A, [name(1)], [row(1)])
    for seconds in (9, 9):
        clock.now += seconds
        rows.touch([A, name(7)])
        rows.sweep()
        assert rows.find([name(1)]) == [True]
    clock.now += 8
    rows.touch([A])
    rows.sweep()
    assert rows.find([name(1), A]) == [False, False]
    assert rows.stats().num_evicted == 1


def test_blocks_beyond_the_limit_are_not_offered(rows: LeasedRows) -> None:
    numbers = range(1, 7)
    offered = rows.offer(A, [name(number) for number in numbers], [row(number) for number in numbers])
    assert offered == [True] * 4 + [False] * 2
    assert rows.offer(B, [name(1), name(9)], [row(1), row(9)]) == [True, False]
    rows.remove([A])
    assert rows.find([name(1), name(2)]) == [True, False]
    assert rows.offer(B, [name(9)], [row(9)]) == [True]


def test_too_many_leases_are_refused(rows: LeasedRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOST_LEASES", 1)
    assert rows.offer(A, [name(1)], [row(1)]) == [True]
    assert rows.offer(B, [name(1)], [row(1)]) == [False]
    assert rows.offer(A, [name(2)], [row(2)]) == [True]


def test_wrong_rows_are_dropped_under_every_lease(rows: LeasedRows) -> None:
    rows.offer(A, [name(1)], [row(1)])
    rows.offer(B, [name(1)], [row(1)])
    rows.remove([name(1)])
    assert rows.find([name(1), A]) == [False, True]
    rows.remove([A, B])
    assert rows.stats().num_bytes == 0


def test_peers_cannot_write(rows: LeasedRows) -> None:
    assert rows.write([name(1)], [row(1)]) == 0
    assert rows.find([name(1)]) == [False]


def test_the_thread_ends_leases_by_itself() -> None:
    kept = LeasedRows(1 << 20, 0.01)
    kept.offer(A, [name(1)], [row(1)])
    until = time.monotonic() + 60
    while kept.find([name(1)]) == [True]:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert kept.stats().num_bytes == 0
    kept.shut_down()
    kept.shut_down()
    assert kept.offer(A, [name(1)], [row(1)]) == [False]
