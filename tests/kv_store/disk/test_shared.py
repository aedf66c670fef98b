# SPDX-License-Identifier: Apache-2.0
"""Disk store of several engines: each saves rows, and all find those of all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quire.kv_store.disk import reader, shared
from quire.kv_store.disk.shared import SharedDiskStore
from tests.kv_store.disk.rows import KEY, NAMESPACE, blank, bytes_of, content_of, limit_of, name_of, row_of


@pytest.fixture(autouse=True)
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "REFRESH_S", 0.0)
    monkeypatch.setattr(reader, "REFRESH_S", 0.0)


def engine(directory: Path, key: bytes | None = None, num_rows: int = 200) -> SharedDiskStore:
    return SharedDiskStore(directory, NAMESPACE, limit_of(num_rows), key)


def write(store: SharedDiskStore, *numbers: int) -> int:
    return store.write([name_of(n) for n in numbers], [row_of(content_of(n)) for n in numbers])


def held(store: SharedDiskStore) -> list[int]:
    """The numbers that the store finds, all of which it reads with the bytes that were written."""
    found = store.find([name_of(number) for number in range(60)])
    numbers = [number for number, is_there in enumerate(found) if is_there]
    rows = [blank() for _ in numbers]
    assert all(store.read([name_of(number) for number in numbers], rows))
    assert [*map(bytes_of, rows)] == [*map(content_of, numbers)]
    return numbers


def directories(directory: Path) -> list[str]:
    return sorted(path.name.removeprefix(NAMESPACE.digest) for path in directory.iterdir())


@pytest.mark.parametrize("key", [None, KEY])
def test_each_engine_finds_the_rows_of_all(tmp_path: Path, key: bytes | None) -> None:
    engines = [engine(tmp_path, key) for _ in range(3)]
    assert [store.is_writable for store in engines] == [True] * 3
    for at, store in enumerate(engines):
        assert write(store, *range(10 * at, 10 * at + 4)) == 4
    assert [held(store) for store in engines] == [[0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]] * 3
    assert write(engines[0], 10, 20, 4) == 3  # of which one is new
    assert engines[0].stats().num_rows == 13
    for store in engines:
        store.close()
        store.close()
    alone = engine(tmp_path, key)
    assert held(alone) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 20, 21, 22, 23]
    alone.close()


def test_directories_of_past_engines_are_used_again(tmp_path: Path) -> None:
    for _ in range(3):
        engines = [engine(tmp_path) for _ in range(2)]
        for store in engines:
            store.close()
    assert directories(tmp_path) == ["", ".1"]


def test_further_engines_than_may_write_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kv_store.disk.namespaces.MOST_WRITERS", 2)
    engines = [engine(tmp_path) for _ in range(3)]
    assert [store.is_writable for store in engines] == [True, True, False]
    for at, store in enumerate(engines):
        write(store, at)
    assert held(engines[2]) == [0, 1]
    for store in engines:
        store.close()


def test_a_directory_deleted_under_engines_costs_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = engine(tmp_path), engine(tmp_path)
    write(first, *range(4))
    write(second, *range(10, 14))
    assert held(second) == [0, 1, 2, 3, 10, 11, 12, 13]
    shutil.rmtree(tmp_path / NAMESPACE.digest)
    assert held(second) == [10, 11, 12, 13]
    shutil.rmtree(tmp_path)
    assert held(second) == [10, 11, 12, 13]  # its files are open
    assert held(first)[:4] == [0, 1, 2, 3]
    assert len([one for one in caplog.messages if "deleted by another program" in one]) == 2  # once each
    for store in (first, second):
        store.close()
    later = engine(tmp_path)
    assert held(later) == []
    assert write(later, 1) == 1
    later.close()


def test_all_engines_together_keep_the_limit(tmp_path: Path) -> None:
    engines = [engine(tmp_path, num_rows=40) for _ in range(2)]
    for number in range(0, 60, 4):
        for at, store in enumerate(engines):
            write(store, *range(1000 * at + number, 1000 * at + number + 4))
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.rows"))
    assert size <= limit_of(40)
    for store in engines:
        store.close()


def test_rows_evicted_here_are_not_lost_elsewhere(tmp_path: Path) -> None:
    first, second = engine(tmp_path), engine(tmp_path)
    write(first, 1, 2)
    assert held(second) == [1, 2]
    first.remove([name_of(1)])
    assert first.pop_removed() == [name_of(1)]
    assert held(second) == [2]
    for store in (first, second):
        store.close()
