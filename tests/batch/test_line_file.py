# SPDX-License-Identifier: Apache-2.0
"""Files of lines: whatever happens, every complete line stays, and an incomplete one goes."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.batch.line_file import SYNC_S, LineFile, drop_lines, opened_lines, replacement
from quire.errors import ConfigError, QuireError
from tests.fixtures.folded import folded

BEGIN = b'{"row":'


def row(number: int) -> dict[str, int]:
    return {"row": number}


def test_lines_are_read_where_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with opened_lines(path, BEGIN) as lines:
        offsets = [lines.append(row(number)) for number in (1, 22)]
    with opened_lines(path, BEGIN) as lines:
        assert list(lines.read()) == list(zip(offsets, [b'{"row":1}\n', b'{"row":22}\n'], strict=True))
        assert lines.append(row(3)) == 21
    assert path.read_bytes() == b'{"row":1}\n{"row":22}\n{"row":3}\n'


@folded("length", range(1, 10))
def test_torn_line_is_cut_off(length: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b'{"row":1}\n' + b'{"row":2}\n'[:length])
    with opened_lines(path, BEGIN) as lines:
        assert len(list(lines.read())) == 1
        lines.append(row(3))
    assert path.read_bytes() == b'{"row":1}\n{"row":3}\n'


def test_end_of_another_kind_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b'{"row":1}\nmy notes')
    with pytest.raises(ConfigError, match="line 2 is no answer"), opened_lines(path, BEGIN) as lines:
        list(lines.read())
    assert path.read_bytes() == b'{"row":1}\nmy notes'


class FullDisk(io.FileIO):
    """File on a disk that has room for so many bytes."""

    room = 25

    def write(self, text: Any) -> int:
        room = self.room - self.tell()
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(bytes(text)[:room])


def test_full_disk_costs_only_the_line_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with FullDisk(path, "w+") as file:
        lines = LineFile(file, path, BEGIN)
        lines.append(row(1))
        lines.append(row(2))
        with pytest.raises(QuireError, match=r"cannot be written to .*a: No space left on device"):
            lines.append(row(3))
        assert path.read_bytes() == b'{"row":1}\n{"row":2}\n'
        file.room = 100
        lines.append(row(4))
    assert path.read_bytes() == b'{"row":1}\n{"row":2}\n{"row":4}\n'


def test_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail() -> None:
        with replacement(path) as out:
            out.write(b"new")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_lines_reach_the_device_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, synced = 0.0, []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(now))
    path = tmp_path / "a"
    with open(path, "w+b", buffering=0) as file:
        lines = LineFile(file, path, BEGIN, clock=lambda: now)
        for step in range(10):
            now = step * SYNC_S / 3
            lines.append(row(step))
    assert synced == [SYNC_S, 2 * SYNC_S, 3 * SYNC_S]


KEEPS: list[Callable[[int], bool]] = [lambda n: n % 2 == 0, lambda n: False, lambda n: True]


@pytest.mark.parametrize("keep", KEEPS)
def test_dropped_lines_are_gone_and_others_stay(keep: Callable[[int], bool], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"".join(b'{"row":%d}\n' % number for number in range(5)) + b'{"ro')
    kept = [number for number in range(5) if keep(number)]
    assert drop_lines(path, BEGIN, lambda line: not keep(int(line[7:-2]))) == 5 - len(kept)
    assert path.read_bytes() == b"".join(b'{"row":%d}\n' % number for number in kept)
    assert list(tmp_path.iterdir()) == [path]


@given(cut=st.integers(0, 200), texts=st.lists(st.text(max_size=10), max_size=5))
def test_file_cut_anywhere_has_its_complete_lines(
    cut: int, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a"
    with opened_lines(path, BEGIN) as lines:
        for text in texts:
            lines.append({"row": 0, "text": text})
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with opened_lines(path, BEGIN) as lines:
        found = [line for _, line in lines.read()]
    assert found == [line for line in whole[:cut].splitlines(keepends=True) if line.endswith(b"\n")]
    assert path.read_bytes() == b"".join(found)
