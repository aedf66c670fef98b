# SPDX-License-Identifier: Apache-2.0
"""A full directory: the limit of all holds, unused folders give way first, and running engines get their shares."""

from __future__ import annotations

import fcntl
import os
import random
import time
from pathlib import Path

import pytest

from quire.kv_store.disk import reader, room, shared, writer
from quire.kv_store.disk.namespaces import CLOCK_ERROR_S
from quire.kv_store.disk.shared import SharedDiskStore
from quire.kv_store.row_store import Namespace
from tests.fixtures.folded import folded
from tests.kv_store.disk.rows import (
    KEY,
    NAMESPACE,
    ROW_BYTES,
    blank,
    bytes_of,
    content_of,
    limit_of,
    name_of,
    row_of,
)

SEGMENT = limit_of(8)
"""Bytes of the smallest segment that is made while there is room."""


@pytest.fixture(autouse=True)
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (shared, "REFRESH_S"),
        (reader, "REFRESH_S"),
        (writer, "GROW_AGAIN_S"),
    ):
        monkeypatch.setattr(module, name, 0.0)


def engine(
    directory: Path, limit: int, namespace: Namespace = NAMESPACE, key: bytes | None = None
) -> SharedDiskStore:
    return SharedDiskStore(directory, namespace, limit, key)


def write(store: SharedDiskStore, start: int, count: int = 4) -> int:
    numbers = range(start, start + count)
    return store.write([name_of(n) for n in numbers], [row_of(content_of(n)) for n in numbers])


def held(store: SharedDiskStore, start: int, count: int) -> list[int]:
    """The numbers that the store finds and reads, each with the bytes that were written under its name."""
    numbers = range(start, start + count)
    store.find([name_of(n) for n in numbers])
    rows = [blank() for _ in numbers]
    done = store.read([name_of(n) for n in numbers], rows)
    got = [number for number, is_there in zip(numbers, done, strict=True) if is_there]
    assert all(
        bytes_of(row) == content_of(n) for n, row, there in zip(numbers, rows, done, strict=True) if there
    )
    return got


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*.rows"))


def own_size(store: SharedDiskStore) -> int:
    return size_of(store._directory / store._own.name)


def fill(directory: Path, limit: int, store: SharedDiskStore, start: int, count: int = 200) -> None:
    """Write rows for which there may be no room; the limit holds after each call."""
    for at in range(start, start + count, 8):
        write(store, at, 8)
        assert size_of(directory) <= limit


@folded(
    ("num_engines", "num_segments"), [(2, 8), (3, 16), (5, 11), pytest.param(16, 20, marks=pytest.mark.more)]
)
def test_engines_get_their_shares_of_a_full_directory(
    num_engines: int, num_segments: int, tmp_path: Path
) -> None:
    """Each comes when those before it have filled the directory; once sizes are even, nothing is taken any more."""
    limit = num_segments * SEGMENT
    share = limit // num_engines
    engines: list[SharedDiskStore] = []
    for at in range(num_engines):
        engines.append(engine(tmp_path, limit))
        fill(tmp_path, limit, engines[-1], 10_000 * at, 8 * num_segments // (at + 1) + 16)
    sizes, start, count = [], 1000, (2 * num_segments // num_engines + 1) * 8
    while sizes != (now := [own_size(store) for store in engines]):
        assert start < 8000, "they take from each other for ever"
        sizes, start = now, start + 1000
        for at, store in enumerate(engines):
            fill(tmp_path, limit, store, 10_000 * at + start, count)
    assert min(sizes) > share - SEGMENT, sizes
    for at, store in enumerate(engines):
        there = held(store, 10_000 * at + start, count)
        assert len(there) == store._own.stats().num_rows >= 8, (sizes, there, store._own.stats())
        assert store.stats().num_corrupt == 0
    for store in engines:
        store.close()


def test_an_engine_that_writes_little_keeps_its_rows(tmp_path: Path) -> None:
    limit = 16 * SEGMENT
    busy, quiet = engine(tmp_path, limit), engine(tmp_path, limit)
    fill(tmp_path, limit, busy, 0)
    write(quiet, 5000, 8)
    fill(tmp_path, limit, busy, 1000)
    assert held(quiet, 5000, 8) == [*range(5000, 5008)]
    assert own_size(busy) > limit - own_size(quiet) - SEGMENT, "what it leaves free is used"
    quiet.close()
    busy.close()


@pytest.mark.parametrize("key", [None, KEY])
def test_rows_that_were_taken_are_misses_for_all(tmp_path: Path, key: bytes | None) -> None:
    """Also for an idle engine, which has the files open: their blocks are free, and it goes on."""
    limit = 10 * SEGMENT
    idle, reader = engine(tmp_path, limit, key=key), engine(tmp_path, limit, key=key)
    fill(tmp_path, limit, idle, 0, 200)
    there = held(reader, 0, 200)
    taker = engine(tmp_path, limit, Namespace({"model": "another"}, ROW_BYTES), key)
    files = [segment._fd for segment in idle._own._segments.values()]
    fill(tmp_path, limit, taker, 0, 200)
    assert sum(os.fstat(fd).st_size == 0 for fd in files) >= 2
    assert reader.find([name_of(number) for number in range(200)]).count(True) < len(there)
    left = held(idle, 0, 200)
    assert held(reader, 0, 200) == left
    assert 0 < len(left) < len(there)
    names = {name_of(number): number for number in range(200)}
    assert {names[name] for name in idle.pop_removed()} == set(range(200)) - set(left)
    assert idle.stats().num_corrupt == reader.stats().num_corrupt == 0
    taker.close()
    fill(tmp_path, limit, idle, 300, 40)
    assert held(reader, 300, 40) == held(idle, 300, 40) == [*range(300, 340)], (
        "files have the names of those taken"
    )
    idle.close()
    reader.close()


def test_folders_of_ended_engines_give_way_first(tmp_path: Path) -> None:
    """Segment by segment, the one used longest ago first; running engines lose nothing meanwhile."""
    limit = 16 * SEGMENT
    running, ended = engine(tmp_path, limit), engine(tmp_path, limit)
    fill(tmp_path, limit, running, 0, 64)
    fill(tmp_path, limit, ended, 1000)
    before = held(running, 0, 64)
    held(ended, 1190, 4)
    ended.close()
    later = engine(tmp_path, limit, Namespace({"model": "another"}, ROW_BYTES))
    write(later, 0, 8)
    assert held(running, 1190, 4) == [*range(1190, 1194)], "the segment used last is still there"
    fill(tmp_path, limit, later, 8, 40)
    assert held(running, 0, 64) == before
    running.close()
    later.close()


def test_a_folder_from_the_future_gives_way_first(tmp_path: Path) -> None:
    """Its engine ran when the clock was wrong; by its times it would stay for ever."""
    namespaces = [Namespace({"model": str(number)}, ROW_BYTES) for number in range(3)]
    limit, now = limit_of(8, 8, 8), time.time()
    for namespace, age in zip(namespaces, (-10.0, CLOCK_ERROR_S + 60, CLOCK_ERROR_S - 60), strict=True):
        store = engine(tmp_path, limit, namespace)
        write(store, 0, 8)
        store.close()
        for file in (tmp_path / namespace.digest).iterdir():
            os.utime(file, (now + age, now + age))
    store = engine(tmp_path, limit)
    assert write(store, 0, 8) == 8
    there = [(tmp_path / namespace.digest).exists() for namespace in namespaces]
    assert there == [True, False, True]
    store.close()


def test_nothing_is_taken_from_a_writer_in_mid_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a writer write while another process takes segments away; both go on without."""
    monkeypatch.setattr(room, "LOCK_S", 0.0)
    monkeypatch.setattr(writer, "LOCK_S", 0.0)
    limit = 8 * SEGMENT
    first, second = engine(tmp_path, limit), engine(tmp_path, limit)
    fill(tmp_path, limit, first, 0, 100)
    folder = os.open(tmp_path / first._own.name, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    before = own_size(first)
    assert write(second, 1000) == 0
    assert write(first, 200) == 0
    assert own_size(first) == before
    os.close(folder)
    assert write(second, 1000) == 4
    assert write(first, 200) == 4
    assert held(second, 1000, 4) == [*range(1000, 1004)]
    first.close()
    second.close()


@folded("seed", range(2))
def test_engines_that_come_and_go_keep_the_limit(seed: int, tmp_path: Path) -> None:
    """Rows are right or missing whatever is taken from whom, and each engine has what it has just written."""
    draw, limit = random.Random(seed), 9 * SEGMENT
    others = [Namespace({"model": str(number)}, ROW_BYTES) for number in range(2)]
    engines: list[SharedDiskStore] = []
    for _ in range(200):
        event = draw.randrange(12)
        if len(engines) < 2 or (event == 0 and len(engines) < 5):
            engines.append(engine(tmp_path, limit, draw.choice([NAMESPACE, *others])))
        elif event == 1:
            engines.pop(draw.randrange(len(engines))).close()
        elif event < 9:
            store, start = draw.choice(engines), draw.randrange(120)
            write(store, start)
            mine = [
                number for number in range(start, start + 4) if store._own.find([name_of(number)]) == [True]
            ]
            assert {*mine} <= {*held(store, start, 4)}
        else:
            held(draw.choice(engines), draw.randrange(120), 8)
        assert size_of(tmp_path) <= limit
        for store in engines:
            own = store._own
            assert {place >> 32 for place in own._index.values()} <= own._segments.keys()
            assert len(own._free) == len(set(own._free))
            assert not set(own._free) & set(own._index.values())
    for store in engines:
        assert write(store, 500) == 4
        assert store.stats().num_corrupt == 0
        store.close()
