# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from quire.processes import collect_garbage, start_python


class Node:
    """It knows itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.own = self


def test_frozen_garbage_is_collected_and_the_rest_stays_frozen() -> None:
    try:
        node = Node()
        alive = weakref.ref(node)
        gc.freeze()
        del node
        gc.collect()
        assert alive() is not None
        collect_garbage()
        assert alive() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    collect_garbage()
    assert gc.get_freeze_count() == 0


_BINDINGS = """
import sys, types
from quire.processes import uncollected
class Node:
    def __del__(self, write=sys.stdout.write):
        write("freed")
node = Node()
node.own = node
with uncollected():
    if len(sys.argv) > 1:
        sys.modules["triton"] = types.ModuleType("triton")
del node
"""


def test_objects_of_bindings_are_freed_before_the_end() -> None:
    for arguments, printed in ([], ""), (["triton"], "freed"):
        command = [sys.executable, "-c", _BINDINGS, *arguments]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == printed


_LEAVING = """
import atexit, sys, threading
from quire.processes import leave
class Node:
    def __del__(self, write=sys.stdout.write):
        write("freed")
node = Node()
atexit.register(print, "handler")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
leave(7)
"""


def test_leave_ends_all_but_frees_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _LEAVING], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (7, ["thread", "handler"], "")


def test_leave_reports_output_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = "from quire.processes import leave; print('text'); leave(0)"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], check=False, stdout=full, stderr=subprocess.PIPE
        )
    assert (done.returncode, b"No space left" in done.stderr) == (120, True)


def test_start_python_works_in_root_with_our_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("NAME = 'mine'")
    (tmp_path / "random.py").write_text("raise SystemExit('a user's file instead of the standard library')")
    monkeypatch.chdir(tmp_path)
    program = (
        "import quire, json, mine, os, random, sys, tests; "
        "print(mine.NAME, os.getcwd(), os.environ['HF_HOME'], sys.argv[1])"
    )
    environment = {**os.environ, "HF_HOME": "hub"}
    with start_python(["-c", program, "x"], environment, stdout=subprocess.PIPE) as child:
        out, _ = child.communicate()
    assert out.decode().split() == ["mine", "/", str(tmp_path / "hub"), "x"]


def test_start_python_without_working_directory_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with start_python(["-c", "import os, quire; print(os.getcwd())"], stdout=subprocess.PIPE) as child:
        out, _ = child.communicate()
    assert out.decode() == "/\n"
    monkeypatch.chdir(tmp_path)
