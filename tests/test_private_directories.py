# SPDX-License-Identifier: Apache-2.0
"""Tests of temporary directories shared by an engine's processes, removed at its end or the next engine's start."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import private_directories

MAKER = """
import sys
from quire import private_directories

print(private_directories.make("ranks-"), flush=True)
sys.stdin.read()
"""


def maker(folder: Path) -> subprocess.Popen[str]:
    """A process that says which directory it has made, and keeps it until its standard input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", MAKER],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    for directory in tmp_path.iterdir():
        private_directories.remove(directory)


def test_directory_is_private_until_removed(folder: Path) -> None:
    directory = private_directories.make("all-")
    assert directory.parent == folder
    assert directory.name.startswith("quire-all-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (directory / "more").mkdir()
    for _ in range(2):
        private_directories.remove(directory)
        assert not directory.exists()


def test_next_engine_removes_only_directories_of_killed_ones(folder: Path) -> None:
    for name in ("quire-of-somebody", "quire-made-a-moment-ago"):
        (folder / name).mkdir()
    (folder / "quire-made-a-moment-ago" / f"new {private_directories._lock_name()}").touch()
    (folder / "quire-of-another-host").mkdir()
    (folder / "quire-of-another-host" / "lock of elsewhere").touch()
    kept = set(folder.iterdir())
    with maker(folder) as one, maker(folder) as other:
        killed, alive = [Path(each.stdout.readline().strip()) for each in (one, other)]  # type: ignore[union-attr]
        one.kill()
        one.wait()
        assert killed.exists()
        own = private_directories.make()
        assert set(folder.iterdir()) == kept | {alive, own}
        another = private_directories.make()
        assert set(folder.iterdir()) == kept | {alive, own, another}
        other.communicate()


def test_one_that_another_process_has_removed_is_held_no_longer() -> None:
    directory = private_directories.make()
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    other = private_directories.make()
    assert directory not in private_directories._locks
    private_directories.remove(other)


def test_without_locks_none_is_taken_for_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError("no locks here")

    with monkeypatch.context() as patch:
        patch.setattr(private_directories.fcntl, "flock", refuse)
        first = private_directories.make()
        second = private_directories.make()
        assert first.exists()
    private_directories.make()
    assert first.exists()
    assert second.exists()
