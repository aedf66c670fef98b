# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.distributed.group import Group, check_same, check_same_word
from quire.errors import StartupError
from quire.models.file_digests import EDGE_BYTES, checkpoint_fingerprint
from tests.fixtures.thread_ranks import InProcess


def test_differing_ranks_and_facts_are_named() -> None:
    def compare(group: Group) -> str:
        try:
            check_same(group, {"version": b"1", "checkpoint": b"ab"[group.rank % 2 :]})
        except StartupError as error:
            return str(error)
        return ""

    def agree(group: Group) -> None:
        check_same(group, {"version": b"1", "checkpoint": b""})

    groups = InProcess.group(4)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(agree, groups)) == [None] * 4
        said = list(threads.map(compare, groups))
    assert said == ["all ranks must have the same checkpoint, but rank 0's differs from that of 1, 3"] * 4


def test_ranks_that_disagree_get_the_differing_values() -> None:
    def compare(group: Group, words: str) -> str:
        try:
            check_same_word(group, "instruction set", words.split()[group.rank], "use one")
        except StartupError as error:
            return str(error)
        return ""

    groups = InProcess.group(3)
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(compare, groups, ["avx2 avx2 avx2"] * 3)) == [""] * 3
        said = list(threads.map(compare, groups, ["avx512 torch avx512"] * 3))
    words = "all ranks must have the same instruction set: avx512 on ranks 0, 2, torch on ranks 1; use one"
    assert said == [words] * 3


def write(directory: Path, **files: bytes) -> bytes:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return checkpoint_fingerprint(directory)


def test_checkpoints_compare_by_files_not_paths(tmp_path: Path) -> None:
    weights = bytes(3 * EDGE_BYTES)
    one = write(tmp_path / "a", config=b"{}", weights=weights)
    assert write(tmp_path / "b", config=b"{}", weights=weights) == one
    others = {
        write(tmp_path / "c", config=b"{ }", weights=weights),
        write(tmp_path / "d", config=b"{}", weights=weights[:-1] + b"1"),
        write(tmp_path / "e", config=b"{}", weights=weights[:-1]),
        write(tmp_path / "f", config=b"{}", weights=weights, more=b""),
    }
    assert len(others | {one}) == 5
