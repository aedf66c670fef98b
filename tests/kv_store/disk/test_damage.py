# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to the files: rows are right or missing, and a store opens."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv_store.disk.rows import KEY, NAMESPACE, OTHER, held, name_of, opened, read, write

NUM = 18
WRITER = """
import sys
from pathlib import Path
from tests.kv_store.disk.rows import opened, write
store = opened(Path(sys.argv[1]), 12)
number = 0
while True:
    write(store, *[(number + i) % 40 for i in range(5)])
    number += 3
    print(number, flush=True)
"""


@pytest.fixture(scope="module", params=[None, KEY], ids=["plain", "encrypted"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, key: bytes | None) -> Path:
    """A directory of rows; tests damage copies of it."""
    directory = tmp_path_factory.mktemp("filled") / "rows"
    store = opened(directory, key=key)
    write(store, *range(NUM))
    store.close()
    return directory


def copied(filled: Path) -> Path:
    copy = filled.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(filled, copy)
    return copy


def check_opens(directory: Path, key: bytes | None) -> list[int]:
    """The rows that a store still has; it works, and takes new rows."""
    for _ in range(2):
        store = opened(directory, key=key)
        assert store.is_writable
        done = read(store, *range(NUM))
        store.close()
    store = opened(directory, key=key)
    assert held(store, NUM) == [number for number in range(NUM) if done[number]]
    assert write(store, *range(40, 44)) == 4
    assert read(store, *range(40, 44)) == [True] * 4
    store.close()
    return [number for number in range(NUM) if done[number]]


@given(data=st.data())
def test_flipped_bits_anywhere_cost_rows_only(filled: Path, key: bytes | None, data: st.DataObject) -> None:
    directory = copied(filled)
    file = data.draw(st.sampled_from(sorted(directory.glob("*/0*.rows"))))
    content = bytearray(file.read_bytes())
    positions = st.one_of(
        st.integers(0, 64), st.integers(4096, 4096 + 64 * 8), st.integers(0, len(content) - 1)
    )
    for at in data.draw(st.lists(positions, min_size=1, max_size=4)):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    check_opens(directory, key)


@given(data=st.data())
def test_cut_and_zeroed_files_cost_rows_only(filled: Path, key: bytes | None, data: st.DataObject) -> None:
    directory = copied(filled)
    file = data.draw(st.sampled_from(sorted(directory.glob("*/0*.rows"))))
    content = file.read_bytes()
    at = data.draw(st.integers(0, len(content)))
    file.write_bytes(content[:at] + bytes(len(content) - at) * data.draw(st.booleans()))
    check_opens(directory, key)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"values": 3}'])
def test_damaged_namespace_file_is_written_again(filled: Path, key: bytes | None, content: bytes) -> None:
    directory = copied(filled)
    (file,) = directory.glob("*/namespace.json")
    before = file.read_bytes()
    file.write_bytes(content)
    assert len(check_opens(directory, key)) > 10
    assert file.read_bytes() == before


def test_segment_of_another_namespace_is_dropped(filled: Path, key: bytes | None) -> None:
    directory = copied(filled)
    other = opened(directory, 100, namespace=OTHER, key=key)
    write(other, *range(NUM))
    other.close()
    for number in (1, 2):
        shutil.copy(
            directory / OTHER.digest / f"0000000{number}.rows",
            directory / NAMESPACE.digest / f"0000000{number}.rows",
        )
    store = opened(directory, 100, key=key)
    assert held(store) == []
    store.close()


def test_old_copy_of_a_segment_serves_no_wrong_rows(filled: Path, key: bytes | None) -> None:
    directory = copied(filled)
    (first,) = directory.glob("*/00000001.rows")
    old = first.read_bytes()
    store = opened(directory, key=key)
    write(store, *range(20, 38))
    store.close()
    first.write_bytes(old)
    first.with_name("00000007.rows").write_bytes(old)
    check_opens(directory, key)


def test_links_and_folders_in_place_of_files_are_dropped(
    filled: Path, tmp_path: Path, key: bytes | None
) -> None:
    directory = copied(filled)
    (first,) = directory.glob("*/00000001.rows")
    victim = tmp_path / "victim"
    victim.write_bytes(first.read_bytes())
    before = victim.read_bytes()
    first.unlink()
    first.symlink_to(victim)
    os.mkfifo(first.with_name("00000008.rows"))
    first.with_name("00000009.rows").mkdir()
    check_opens(directory, key)
    assert victim.read_bytes() == before


def test_writer_killed_at_any_moment_leaves_right_rows(tmp_path: Path) -> None:
    """Rows that the next process finds have their bytes, and the lock is free."""
    draw = random.Random(0)
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        ) as child:
            assert child.stdout is not None
            for _ in range(draw.randrange(1, 60)):
                child.stdout.readline()
            child.send_signal(signal.SIGKILL)
        store = opened(tmp_path, 12)
        assert store.is_writable
        found = held(store)
        assert read(store, *found) == [True] * len(found)
        store.close()


def test_removed_rows_stay_removed(filled: Path, key: bytes | None) -> None:
    directory = copied(filled)
    store = opened(directory, key=key)
    before = held(store)
    store.remove([name_of(number) for number in (0, 1, 50)])
    store.close()
    assert check_opens(directory, key) == before[2:]
