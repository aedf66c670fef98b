# SPDX-License-Identifier: Apache-2.0
"""`quire kv-store` beside stores that are open, closed and damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.entrypoints.cli.main import EXIT_FAILED, EXIT_USAGE, main
from quire.kv_store.disk.segment import SegmentLayout
from tests.fixtures.folded import folded
from tests.kv_store.disk.rows import KEY, NAMESPACE, OTHER, ROW_BYTES, held, limit_of, opened, read, write


def listed(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert main(["kv-store", "ls", str(directory), "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def damage(directory: Path, slot: int) -> None:
    (file,) = directory.glob("*/00000001.rows")
    layout = SegmentLayout(NAMESPACE.digest, ROW_BYTES)
    with file.open("r+b") as segment:
        segment.seek(layout.payloads_at(8) + slot * layout.stride)
        segment.write(b"damage")


def test_ls_shows_the_namespace_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = opened(tmp_path), opened(tmp_path, 100, OTHER, key=KEY)
    write(first, *range(5))
    second.close()
    by_digest = {state["digest"]: state for state in listed(tmp_path, capsys)}
    assert set(by_digest) == {NAMESPACE.digest, OTHER.digest}
    state = by_digest[NAMESPACE.digest]
    assert (state["num_rows"], state["is_in_use"], state["is_encrypted"]) == (5, True, False)
    assert (state["values"], state["row_bytes"]) == (NAMESPACE.values, ROW_BYTES)
    state = by_digest[OTHER.digest]
    assert (state["num_rows"], state["is_in_use"], state["is_encrypted"]) == (0, False, True)
    assert main(["kv-store", "ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "    model: other\n" in out
    assert "2 namespaces" in out
    first.close()


@pytest.mark.parametrize("key", [None, KEY])
def test_check_removes_damaged_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: bytes | None
) -> None:
    store = opened(tmp_path, key=key)
    write(store, *range(8))
    store.close()
    assert main(["kv-store", "check", str(tmp_path)]) == 0
    assert "8 rows, all whole" in capsys.readouterr().out
    damage(tmp_path, 3)
    assert main(["kv-store", "check", str(tmp_path)]) == EXIT_FAILED
    assert "8 rows, damaged: 1 rows: removed" in capsys.readouterr().out
    assert main(["kv-store", "check", str(tmp_path)]) == 0
    assert held(opened(tmp_path, key=key)) == [0, 1, 2, 4, 5, 6, 7]


def test_check_removes_files_without_a_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = opened(tmp_path)
    write(store, *range(16))
    store.close()
    (tmp_path / NAMESPACE.digest / "00000002.rows").write_bytes(b"damage")
    os.mkfifo(tmp_path / NAMESPACE.digest / "00000003.rows")
    assert listed(tmp_path, capsys)[0]["num_rows"] == 8
    assert main(["kv-store", "check", str(tmp_path)]) == EXIT_FAILED
    assert "file 00000002.rows, file 00000003.rows: removed" in capsys.readouterr().out
    assert main(["kv-store", "check", str(tmp_path)]) == 0


@folded("size", ["nan", "inf", "-1"])
def test_gc_to_no_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    assert main(["kv-store", "gc", str(tmp_path), "--max-gb", size]) == EXIT_USAGE
    assert "--max-gb" in capsys.readouterr().err


def test_check_leaves_a_running_engine_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = opened(tmp_path)
    write(store, *range(8))
    damage(tmp_path, 3)
    for _ in range(2):
        assert main(["kv-store", "check", str(tmp_path)]) == EXIT_FAILED
        assert "left for the engine" in capsys.readouterr().out
    assert read(store, *range(8)).count(False) == 1
    assert main(["kv-store", "check", str(tmp_path)]) == 0
    store.close()


def test_gc_removes_least_recently_used_and_skips_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = opened(tmp_path, 100, OTHER), opened(tmp_path, 100)
    write(old, *range(16))
    write(new, *range(24))
    old.close()
    read(new, *range(8))
    for age, namespace in enumerate((OTHER, NAMESPACE)):
        for file in (tmp_path / namespace.digest).iterdir():
            os.utime(file, (age, age))
    keep = [str(tmp_path), "--max-gb", str(limit_of(12) / 2**30)]
    assert main(["kv-store", "gc", *keep]) == 0
    assert f"{NAMESPACE.digest} is in use: left alone" in capsys.readouterr().out
    new.close()
    assert main(["kv-store", "gc", *keep]) == 0
    (state,) = listed(tmp_path, capsys) if not capsys.readouterr().err else ()
    assert state["digest"] == NAMESPACE.digest
    assert state["num_bytes"] <= limit_of(12)  # type: ignore[operator]
    assert main(["kv-store", "gc", str(tmp_path), "--max-gb", "0"]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["ls"], ["check"], ["gc", "--max-gb", "1"]])
def test_missing_directory_is_a_mistake_of_the_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main(["kv-store", command[0], str(tmp_path / "none"), *command[1:]]) == EXIT_USAGE
    assert "cannot be opened: No such file or directory" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_commands_import_no_torch(tmp_path: Path) -> None:
    program = f"import sys; from quire.entrypoints.cli.main import main; main(['kv-store', 'ls', {str(tmp_path)!r}]); "
    subprocess.run([sys.executable, "-c", program + "assert 'torch' not in sys.modules"], check=True)
