# SPDX-License-Identifier: Apache-2.0
"""A directory never exceeds its limit, and what goes is what was used longest ago."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.models.bounded_directory import BoundedDirectory

LIMIT = 100
KEYS = [f"{number:032x}" for number in range(6)]
ACTIONS = st.lists(st.tuples(st.sampled_from(KEYS), st.one_of(st.none(), st.integers(0, LIMIT))), max_size=20)
"""A key with the size that its file is written in, or None: it is used."""


def write(directory: BoundedDirectory, place: Path, size: int) -> None:
    with directory.new_file(place, size) as file:
        file.write(b"x" * size)


@given(actions=ACTIONS)
def test_the_least_recently_used_make_room(
    actions: list[tuple[str, int | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = BoundedDirectory(tmp_path_factory.mktemp("bounded"), "bin", LIMIT)
    bystander = directory.path / "mine.bin"
    bystander.write_bytes(b"x" * 2 * LIMIT)
    kept: dict[str, int] = {}  # the least recently used first
    for clock, (key, size) in enumerate(actions):
        place = directory.place("model", key)
        if size is None:
            directory.touch(place)
            if key in kept:
                kept[key] = kept.pop(key)
        else:
            write(directory, place, size)
            kept.pop(key, None)
            while sum(kept.values()) + size > LIMIT:
                del kept[next(iter(kept))]
            kept[key] = size
        if place.exists():
            os.utime(place, (clock, clock))  # a clock that never stands still
        found = {path.name.split(".")[1]: path.stat().st_size for path in directory.path.glob("model.*")}
        assert found == kept
    assert bystander.stat().st_size == 2 * LIMIT


def test_new_file_after_an_error_leaves_the_old_one(tmp_path: Path) -> None:
    directory = BoundedDirectory(tmp_path, "bin", LIMIT)
    place = directory.place("model", KEYS[0])
    write(directory, place, 3)
    with pytest.raises(TypeError, match="str"), directory.new_file(place, 5) as file:
        file.writelines([b"yy", "no bytes"])  # type: ignore[list-item]
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"xxx"]


def test_new_file_over_the_limit_deletes_nothing(tmp_path: Path) -> None:
    directory = BoundedDirectory(tmp_path, "bin", LIMIT)
    write(directory, directory.place("model", KEYS[0]), LIMIT)
    with pytest.raises(OSError, match="over the limit"):
        write(directory, directory.place("model", KEYS[1]), LIMIT + 1)
    assert len(list(tmp_path.iterdir())) == 1
