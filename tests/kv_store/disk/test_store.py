# SPDX-License-Identifier: Apache-2.0
"""Disk store beside a model of it: a dictionary and a list in the order of use."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.kv_store.disk.store import DiskStore
from tests.kv_store.disk.rows import KEY, held, name_of, opened, read, write

NUM_NAMES = 40
NUM_ROWS = 20
CHAIN = st.lists(st.integers(0, NUM_NAMES - 1), min_size=1, max_size=25, unique=True)


class Model:
    """Rows as a list, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.rows: list[int] = []
        self.capacity = capacity
        self.removed: list[int] = []

    def touch(self, chain: list[int]) -> None:
        for number in reversed(chain):
            if number in self.rows:
                self.rows.remove(number)
                self.rows.append(number)

    def write(self, chain: list[int]) -> int:
        self.touch(chain)
        new = [number for number in chain if number not in self.rows]
        while len(self.rows) + len(new) > self.capacity and self.rows and self.rows[0] not in chain:
            self.removed.append(self.rows.pop(0))
        self.rows += new[: self.capacity - len(self.rows)]
        self.touch(chain)
        return sum(number in self.rows for number in chain)

    def remove(self, chain: list[int]) -> None:
        self.removed += [number for number in chain if number in self.rows]
        self.rows = [number for number in self.rows if number not in chain]


class StoreAndModel(RuleBasedStateMachine):
    """One writer that is closed and opened again at any time, readers, and damaged rows."""

    store: DiskStore

    @initialize(encrypted=st.booleans())
    def start(self, encrypted: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.options = {"key": KEY} if encrypted else {}
        self.store = opened(self.directory, NUM_ROWS, **self.options)
        capacity = write(self.store, *range(NUM_NAMES))
        assert NUM_ROWS - 4 <= capacity <= NUM_ROWS  # each segment has a header
        self.model = Model(capacity)
        self.model.write(list(range(NUM_NAMES)))
        self.num_corrupt = 0

    @rule(chain=CHAIN)
    def write(self, chain: list[int]) -> None:
        assert write(self.store, *chain) == self.model.write(chain)

    @rule(chain=CHAIN)
    def read(self, chain: list[int]) -> None:
        assert read(self.store, *chain) == [number in self.model.rows for number in chain]
        self.model.touch(chain)

    @rule(chain=CHAIN)
    def remove(self, chain: list[int]) -> None:
        self.store.remove([name_of(number) for number in chain])
        self.model.remove(chain)

    @rule()
    def restart(self) -> None:
        self.check_removed()
        self.store.close()
        self.store.close()
        self.store = opened(self.directory, NUM_ROWS, **self.options)
        self.num_corrupt = 0

    @rule(chain=CHAIN)
    def read_beside(self, chain: list[int]) -> None:
        reader = opened(self.directory, NUM_ROWS, **self.options)
        assert not reader.is_writable
        assert held(reader) == sorted(self.model.rows)
        assert read(reader, *chain) == [number in self.model.rows for number in chain]
        assert write(reader, *chain) == sum(number in self.model.rows for number in chain)
        reader.close()

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """One byte of one row changes on the disk: it is a miss, and then gone."""
        if not self.model.rows:
            return
        number = data.draw(st.sampled_from(self.model.rows))
        place = self.store._index[self.store._hidden([name_of(number)])[0]]
        segment = self.store._segments[place >> 32]
        file = next(self.directory.glob(f"*/{place >> 32:08d}.rows"))
        at = segment._payload_at(place & 0xFFFFFFFF) + data.draw(st.integers(0, segment.payload_bytes - 1))
        flip(file, at, data.draw(st.integers(0, 7)))
        assert read(self.store, number) == [False]
        self.model.remove([number])
        self.num_corrupt += 1

    @invariant()
    def same_rows(self) -> None:
        assert held(self.store) == sorted(self.model.rows)
        stats = self.store.stats()
        assert stats.num_rows == len(self.model.rows)
        assert stats.num_corrupt == self.num_corrupt
        assert stats.num_bytes <= stats.max_bytes

    def check_removed(self) -> None:
        names = {name_of(number): number for number in range(NUM_NAMES)}
        assert sorted(names[name] for name in self.store.pop_removed()) == sorted(self.model.removed)
        self.model.removed.clear()

    def teardown(self) -> None:
        self.check_removed()
        self.store.close()
        shutil.rmtree(self.directory)


def flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as opened_file:
        opened_file.seek(at)
        byte = opened_file.read(1)[0]
        opened_file.seek(at)
        opened_file.write(bytes([byte ^ 1 << bit]))


TestStoreAndModel = StoreAndModel.TestCase
TestStoreAndModel.settings = settings(max_examples=40, stateful_step_count=30)
