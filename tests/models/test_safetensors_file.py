# SPDX-License-Identifier: Apache-2.0
"""The reader of safetensors files, against the official library and against damaged files."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import ModelLoadError
from quire.models.json_object import read_json_object
from quire.models.safetensors_file import SafetensorsFile
from tests.fixtures.folded import folded

TENSORS: dict[str, Tensor] = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.tensor([True, False, True]),
    "d": torch.arange(4, dtype=torch.int64),
    "e": torch.tensor(1.5, dtype=torch.float16),
}


def write(path: Path, header: dict[str, Any] | bytes, data: bytes) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(start: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
    }


def test_file_written_by_the_library_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.tensors.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        found = file.tensor(file.tensors[name])
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_a_tensor_at_an_odd_byte(tmp_path: Path) -> None:
    data = b"\x01" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    path = write(tmp_path / "x", {"u": entry(0, 1, "U8", [1]), "f": entry(1, 9)}, data)
    file = SafetensorsFile(path)
    assert file.tensor(file.tensors["f"]).tolist() == [1.5, -2.0]


@pytest.mark.item(26)
@folded(
    ("header", "words"),
    [
        (b"{x", "not valid JSON"),
        (b"[]", "no JSON object"),
        (b'{"a": {}, "a": {}}', "twice"),
        ({"a": 1}, "'a' has the unknown dtype"),
        ({"a": entry(0, 8, "F33")}, "'a' has the unknown dtype 'F33'"),
        ({"a": entry(0, 8, shape=[-2])}, "'a' has a malformed shape"),
        ({"a": entry(0, 8, shape="2")}, "'a' has a malformed shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, "'a' has a malformed shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [True, 8]}}, "'a' has a malformed shape"),
        ({"a": entry(0, 8, shape=[3])}, r"'a': F32 \[3\] needs 12 bytes, but data_offsets span 8"),
        ({"a": entry(0, 8, shape=[2**62, 2**62])}, "'a'.*needs"),
        ({"a": entry(8, 0, shape=[2])}, "'a'.*needs 8 bytes, but data_offsets span -8"),
        ({"a": entry(0, 8), "b": entry(4, 8)}, "'b' overlaps"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, "'b' overlaps"),
        ({"a": entry(4, 8)}, "'a' leaves a gap"),
        ({"a": entry(0, 4)}, "4 bytes after the last tensor"),
        ({"a": entry(0, 16)}, "truncated: tensor 'a' ends"),
        ({"a": entry(0, 2**62, shape=[2**60])}, "truncated: tensor 'a' ends"),
    ],
)
def test_damaged_headers(header: dict[str, Any] | bytes, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: .*{words}"):
        SafetensorsFile(path)


@pytest.mark.item(26)
@pytest.mark.parametrize(
    "content", [b"", b"\x01", b"\xff" * 8, (100).to_bytes(8, "little") + b"{}", bytes(8)]
)
def test_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ModelLoadError, match="no safetensors file"):
        SafetensorsFile(tmp_path / "x")


@pytest.mark.item(26)
def test_path_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ModelLoadError, match="is no file"):
            SafetensorsFile(path)
        with pytest.raises(ModelLoadError, match="is no file"):
            read_json_object(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        SafetensorsFile(tmp_path / "x")


@pytest.mark.item(26, 58)
@settings(
    max_examples=300,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    length=st.integers(0, 400),
    damage=st.lists(st.tuples(st.integers(0, 399), st.integers(0, 255)), max_size=3),
)
def test_any_damage_gives_tensors_inside_the_file_or_an_error(
    length: int, damage: list[tuple[int, int]], tmp_path: Path
) -> None:
    path = tmp_path / "x"
    save_file(TENSORS, path)
    content = bytearray(path.read_bytes())
    for position, value in damage:
        content[position % len(content)] = value
    path.write_bytes(content[:length] if length < 100 else content)
    with contextlib.suppress(ModelLoadError):
        file = SafetensorsFile(path)
        for info in file.tensors.values():
            assert file.tensor(info).nbytes == info.end - info.start
