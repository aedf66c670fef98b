# SPDX-License-Identifier: Apache-2.0
"""Files in whisper.cpp's form, read back by their layout."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from benchmarks.whisper_cpp import convert
from tests.speech.tiny import save_tiny_whisper

Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])


def read(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def tensors(file: BinaryIO) -> dict[str, NDArray[Any]]:
    """Return the tensors up to the end of a file, in float32."""
    found = {}
    while head := file.read(12):
        rank, length, code = struct.unpack("<3i", head)
        shape = read(file, f"<{rank}i")[::-1]
        name, count = file.read(length).decode(), int(np.prod(shape))
        if code == 8:
            blocks = np.frombuffer(file.read(count // 32 * Q8_0.itemsize), Q8_0)
            values = blocks["scale"][:, None].astype(np.float32) * blocks["codes"]
        else:
            kind = np.dtype({0: "<f4", 1: "<f2"}[code])
            values = np.frombuffer(file.read(count * kind.itemsize), kind)
        found[name] = values.astype(np.float32).reshape(shape)
    return found


@pytest.mark.parametrize(("kind", "most"), [("f16", 1e-3), ("q8_0", 1e-2)])
def test_converted_file_has_sizes_tokens_and_weights(tmp_path: Path, kind: str, most: float) -> None:
    source, target = save_tiny_whisper(tmp_path / "model"), tmp_path / "file.bin"
    convert(source, target, kind)
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.decoder.embed_tokens.weight"]
    with target.open("rb") as file:
        magic, num_tokens, *_, num_bins, file_type = read(file, "<12i")
        assert (magic.to_bytes(4, "big"), num_tokens) == (b"ggml", len(embedding))
        assert file_type == {"f16": 1, "q8_0": 2007}[kind]
        assert read(file, "<2i") == (num_bins, 201)
        file.seek(4 * num_bins * 201, 1)
        for _ in range(read(file, "<i")[0]):
            file.seek(read(file, "<i")[0], 1)
        found = tensors(file)
    assert len(found) == len(weights)
    for name, theirs in (
        ("decoder.token_embedding.weight", embedding),
        ("encoder.blocks.0.attn.query.weight", weights["model.encoder.layers.0.self_attn.q_proj.weight"]),
        ("decoder.blocks.1.mlp.2.bias", weights["model.decoder.layers.1.fc2.bias"]),
    ):
        assert np.abs(found[name] - theirs).max() <= most * np.abs(theirs).max()
