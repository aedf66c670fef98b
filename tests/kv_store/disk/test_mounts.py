# SPDX-License-Identifier: Apache-2.0
"""Rows on file systems that are mounted read-only, or become so under open files, in a mount namespace of the test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

START = """
import subprocess, sys
from pathlib import Path
from tests.kv_store.disk.rows import opened, read, write

def mount(*words):
    command = ["mount", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print("refused:", *command, done.stderr)
        raise SystemExit(77)

place, image = sys.argv[1:]
rows = Path(place) / "rows"
"""

REMOUNTED = """
mount("-t", "tmpfs", "none", place)
store = opened(rows, 100)
assert write(store, *range(8)) == 8
store.close()
mount("-o", "remount,ro", place)
store = opened(rows, 100)
assert not store.is_writable
assert read(store, *range(9)) == [True] * 8 + [False]
assert write(store, 8) == 0
store.close()
mount("-o", "remount,rw", place)
store = opened(rows, 100)
assert (store.is_writable, write(store, 8), read(store, *range(9))) == (True, 1, [True] * 9)
"""

ABORTED = """
subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
mount("-o", "loop", image, place)
store = opened(rows, 100)
assert write(store, *range(8)) == 8
mount("-o", "remount,abort", place)
assert read(store, *range(9)) == [True] * 8 + [False]
assert write(store, 8) == 0
assert read(store, *range(8)) == [True] * 8
store.close()
store = opened(rows, 100)
assert (store.is_writable, read(store, *range(8))) == (False, [True] * 8)
"""


def run_in_mount_namespace(program: str, folder: Path) -> None:
    """Run a program with a place to mount to and a file of 32 MiB; skip the test where the system refuses mounts."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("this system refuses `unshare -m`: run the test as root")
    (folder / "place").mkdir()
    with (folder / "image").open("wb") as image:
        image.truncate(32 << 20)
    paths = [str(folder / "place"), str(folder / "image")]
    command = ["unshare", "-m", sys.executable, "-c", START + program, *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stderr


def test_rows_are_read_on_a_read_only_mount(tmp_path: Path) -> None:
    run_in_mount_namespace(REMOUNTED, tmp_path)


@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="needs mkfs.ext4")
def test_rows_are_read_after_an_error_of_the_disk(tmp_path: Path) -> None:
    """The file system turns read-only under the open files, as it does by itself after errors."""
    run_in_mount_namespace(ABORTED, tmp_path)
