# SPDX-License-Identifier: Apache-2.0
"""The reader of GGUF files, against the `gguf` package and against damaged files."""

from __future__ import annotations

import contextlib
import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import ModelLoadError
from quire.models.gguf.file import GgufFile
from tests.fixtures.folded import folded

SHAPES = {
    "blk.0.attn_q.weight": (2, 64),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_up_exps.weight": (3, 2, 32),
}


def write(path: Path, **more: Any) -> Path:
    """A file of the package with values of every type and three tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for method in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{method}")(f"test.{method}", 7)
    writer.add_float32("test.float32", 0.5)
    writer.add_float64("test.float64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "ünï")
    writer.add_array("test.strings", ["a", "", "ß"])
    writer.add_array("test.integers", [1, 2, 3])
    writer.add_array("test.floats", [0.5, -1.0])
    writer.add_array("test.nested", [[1, 2], [3, 4]])
    for key, value in more.items():
        getattr(writer, f"add_{key}")(*value)
    for name, shape in SHAPES.items():
        tensor = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "whole.gguf").read_bytes()


def test_file_written_by_the_package_is_read(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "x.gguf"))
    assert file.metadata["general.architecture"] == "llama"
    sizes = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    assert [file.metadata[f"test.{size}"] for size in sizes] == [7] * 8
    assert file.metadata["test.float32"] == 0.5
    assert file.metadata["test.float64"] == 0.1
    assert file.metadata["test.bool"] is True
    assert file.metadata["test.string"] == "ünï"
    assert file.metadata["test.strings"] == ["a", "", "ß"]
    assert file.metadata["test.integers"] == [1, 2, 3]
    assert file.metadata["test.floats"] == [0.5, -1.0]
    assert file.metadata["test.nested"] == [[1, 2], [3, 4]]
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert file.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        entry = file.tensors[name]
        assert entry.shape == SHAPES[name]
        assert entry.type.name == tensor.tensor_type.name
        assert file.map[entry.start : entry.end] == tensor.data.tobytes()


def test_another_alignment(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "x.gguf", custom_alignment=[128]))
    data = {entry.start for entry in file.tensors.values()}
    assert all(start % 128 == 0 for start in data)


@pytest.mark.item(26)
def test_every_cut_is_noticed(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    last = max(entry.end for entry in GgufFile(write(tmp_path / "whole.gguf")).tensors.values())
    for length in range(0, last, 3):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"x\.gguf: (truncated|no GGUF file)"):
            GgufFile(path)


@pytest.mark.item(26, 58)
@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_are_refused_or_harmless(
    changes: list[tuple[int, int]], whole: bytes, tmp_path: Path
) -> None:
    content = bytearray(whole)
    for place, value in changes:
        content[place % len(content)] = value
    (tmp_path / "x.gguf").write_bytes(content)
    with contextlib.suppress(ModelLoadError):
        file = GgufFile(tmp_path / "x.gguf")
        ends = [(entry.start, entry.end) for entry in file.tensors.values()]
        assert ends == sorted(ends)
        assert all(end <= len(content) for _, end in ends)
        assert all(one[1] <= other[0] for one, other in pairwise(ends))


def header(*, version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str = "w", sides: tuple[int, ...] = (32,), kind: int = 0, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, start)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


ONE = struct.pack("<I", 1)


@pytest.mark.item(26)
@folded(
    ("content", "words"),
    [
        (b"", "no GGUF file"),
        (b"PK\x03\x04", "no GGUF file: it begins with b'PK"),
        (header(version=1), "version 1 is not supported"),
        (header(version=4), "version 4 is not supported; it must be little-endian, 2 or 3$"),
        (header(version=3 << 24), "version 50331648, of a big-endian file, is not supported"),
        (header(version=5 << 24), "version 83886080 is not supported"),
        (
            header(version=0),
            "version 0 is not supported; .*: it has zeros there, as a file that was never written",
        ),
        (bytes(64), "no GGUF file: it begins with .*: it has zeros there"),
        (header(tensors=2**60), f"has room for 0 of its {2**60} tensors"),
        (header(keys=2**60), f"has room for 0 of its {2**60} keys"),
        (header(keys=1, rest=key("a", 13, ONE)), "'a' has the unknown type 13"),
        (header(keys=2, rest=key("a", 4, ONE) * 2), "'a' appears twice"),
        (header(keys=1, rest=key("a", 8, struct.pack("<Q", 2**63))), "value of 'a' ends at byte"),
        (header(keys=1, rest=key("a", 8, struct.pack("<Q", 1) + b"\xff")), "value of 'a' is no UTF-8"),
        (
            header(keys=1, rest=key("a", 9, struct.pack("<IQ", 6, 2**40))),
            f"{2**40} values of 'a'",
        ),
        (
            header(keys=1, rest=key("a", 9, struct.pack("<IQ", 8, 2**40))),
            f"{2**40} values of 'a'",
        ),
        (header(keys=1, rest=key("a", 9, struct.pack("<IQ", 9, 1) * 6)), "'a' nests arrays more than 4 deep"),
        (
            header(keys=1, rest=key("general.alignment", 4, ONE)),
            "general.alignment is 1; it must be a power of two",
        ),
        (header(tensors=1, rest=tensor(sides=())), "'w' has 0 dimensions"),
        (header(tensors=1, rest=tensor(sides=(1,) * 5)), "'w' has 5 dimensions"),
        (header(tensors=1, rest=tensor(sides=(4, 0))), r"'w' has shape \[0, 4\]"),
        (
            header(tensors=1, rest=tensor(kind=16)),
            "'w' is of type IQ2_XXS, which quire does not read; known are F32",
        ),
        (header(tensors=1, rest=tensor(kind=99)), "'w' is of type 99"),
        (
            header(tensors=1, rest=tensor(sides=(33,), kind=8)),
            "'w': rows of 33 are no multiple of Q8_0's blocks of 32",
        ),
        (header(tensors=1, rest=tensor(start=8)), "'w' begins at byte 8 of the data, no multiple of 32"),
        (header(tensors=1, rest=tensor(sides=(2**40,))), "truncated: tensor 'w' ends at byte"),
        (header(tensors=2, rest=tensor() * 2), "'w' appears twice"),
        (
            header(tensors=2, rest=tensor() + tensor("v", start=64)),
            "'v' begins at byte 160, and 'w' before it ends at 224",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content + bytes(512 if b"w" in content else 0))
    with pytest.raises(ModelLoadError, match=rf"x\.gguf: .*{words}"):
        GgufFile(tmp_path / "x.gguf")


@pytest.mark.item(26)
def test_path_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ModelLoadError, match="is no file"):
            GgufFile(path)
    with pytest.raises(ModelLoadError, match="no such file"):
        GgufFile(tmp_path / "x.gguf")


def test_strings_of_an_array_are_decoded_when_they_are_read(tmp_path: Path) -> None:
    texts = [b"", "ü".encode(), b"\xff"]
    entries = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    (tmp_path / "x.gguf").write_bytes(
        header(keys=2, rest=key("good", 9, struct.pack("<IQ", 8, 2) + entries[:18]))
        + key("bad", 9, struct.pack("<IQ", 8, 3) + entries)
        + bytes(64)
    )
    metadata = GgufFile(tmp_path / "x.gguf").metadata
    assert (metadata["good"], len(metadata), list(metadata)) == (["", "ü"], 2, ["good", "bad"])
    with pytest.raises(ModelLoadError, match=r"x\.gguf: a value of 'bad' is no UTF-8, by its byte 0"):
        metadata["bad"]


@folded("cut", range(1, 28))
def test_array_of_strings_that_ends_after_the_file_is_refused(cut: int, tmp_path: Path) -> None:
    entries = struct.pack("<IQ", 8, 3) + b"".join(
        struct.pack("<Q", 1) + letter for letter in (b"a", b"b", b"c")
    )
    (tmp_path / "x.gguf").write_bytes(header(keys=1, rest=key("a", 9, entries))[:-cut])
    problem = (
        f"value {2 - (cut - 1) // 9} of 'a' ends after byte"
        if cut <= 3
        else r"it has room for \d of its 3 values of 'a'"
    )
    with pytest.raises(ModelLoadError, match=rf"x\.gguf: truncated: {problem}"):
        GgufFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("length", [2**32, 2**63, 2**64 - 1])
def test_string_of_an_array_longer_than_the_file_is_refused(length: int, tmp_path: Path) -> None:
    entries = struct.pack("<IQQ", 8, 2, 1) + b"a" + struct.pack("<Q", length)
    (tmp_path / "x.gguf").write_bytes(header(keys=1, rest=key("a", 9, entries)) + bytes(64))
    with pytest.raises(ModelLoadError, match=r"truncated: value 1 of 'a' ends after byte"):
        GgufFile(tmp_path / "x.gguf")
