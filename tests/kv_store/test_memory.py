# SPDX-License-Identifier: Apache-2.0
"""Row store in memory against a plain list in order of use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.kv_store.memory import ROW_OVERHEAD_BYTES, MemoryStore, RowMemory
from quire.kv_store.row_store import Namespace
from tests.kv_store.rows import content_of, empty_rows, name_of, rows_of

ROW_BYTES = 64
NAMESPACE = Namespace({"weights": "a"}, ROW_BYTES)
CAPACITY = 4
MAX_BYTES = CAPACITY * (ROW_BYTES + ROW_OVERHEAD_BYTES)

chains = st.lists(st.integers(0, 9), max_size=7, unique=True)
steps = st.lists(st.tuples(st.sampled_from(["write", "read", "remove", "find"]), st.integers(0, 1), chains))


class Oracle:
    """Keys in order of use, the least recently used one first."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []

    def touch(self, keys: list[tuple[int, int]]) -> None:
        used = [key for key in reversed(keys) if key in self.keys]
        self.keys = [key for key in self.keys if key not in used] + used

    def write(self, keys: list[tuple[int, int]]) -> int:
        self.touch(keys)
        for key in keys:
            if key not in self.keys:
                if len(self.keys) == CAPACITY:
                    if self.keys[0] in keys:
                        break
                    del self.keys[0]
                self.keys.append(key)
        self.touch(keys)
        return len(set(keys) & set(self.keys))


@given(steps)
def test_memory_store_agrees_with_a_list_in_order_of_use(taken: list[tuple[str, int, list[int]]]) -> None:
    memory, oracle = RowMemory(MAX_BYTES), Oracle()
    stores = [MemoryStore(NAMESPACE, memory), MemoryStore(NAMESPACE, memory)]
    expected_removed: list[list[bytes]] = [[], []]
    for step, index, chain in taken:
        store, names, keys = stores[index], [name_of(n) for n in chain], [(index, n) for n in chain]
        before = set(oracle.keys)
        if step == "write":
            assert store.write(names, rows_of(chain, ROW_BYTES)) == oracle.write(keys)
        elif step == "read":
            rows = empty_rows(len(chain), ROW_BYTES)
            flags = store.read(names, rows)
            assert flags == [key in oracle.keys for key in keys]
            for n, row, flag in zip(chain, rows, flags, strict=True):
                assert not flag or b"".join(row) == content_of(n, ROW_BYTES)
            oracle.touch(keys)
        elif step == "remove":
            store.remove(names)
            oracle.keys = [key for key in oracle.keys if key not in keys]
        for owner, n in before - set(oracle.keys):
            expected_removed[owner].append(name_of(n))
        assert store.find(names) == [key in oracle.keys for key in keys]
    for index, store in enumerate(stores):
        assert sorted(store.pop_removed()) == sorted(expected_removed[index])
        assert store.pop_removed() == []
        stats = store.stats()
        assert stats.num_rows == sum(owner == index for owner, _ in oracle.keys)
        assert (stats.num_bytes, stats.max_bytes) == (stats.num_rows * ROW_BYTES, MAX_BYTES)


def test_memory_store_larger_row_than_the_limit_is_left_out() -> None:
    store = MemoryStore(NAMESPACE, RowMemory(ROW_BYTES))
    assert store.write([name_of(1)], rows_of([1], ROW_BYTES)) == 0
    assert store.find([name_of(1)]) == [False]


def test_memory_store_close_gives_its_room_to_others() -> None:
    memory = RowMemory(MAX_BYTES)
    first, second = MemoryStore(NAMESPACE, memory), MemoryStore(NAMESPACE, memory)
    numbers = list(range(CAPACITY))
    first.write([name_of(n) for n in numbers], rows_of(numbers, ROW_BYTES))
    first.close()
    first.close()
    assert first.stats().num_rows == 0
    assert second.write([name_of(n) for n in numbers], rows_of(numbers, ROW_BYTES)) == CAPACITY
    assert first.stats().num_evicted == 0


def test_row_memory_without_room_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        RowMemory(0)
