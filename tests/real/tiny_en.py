# SPDX-License-Identifier: Apache-2.0
"""Conversion of Whisper tiny.en, shipped in CTranslate2's format, to a checkpoint in transformers' layout."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

DTYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
SIZES = {
    "vocab_size": 51864,
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "scale_embedding": False,
    "activation_function": "gelu",
    "is_encoder_decoder": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "pad_token_id": 50256,
    "decoder_start_token_id": 50257,
    "tie_word_embeddings": True,
}
PLAIN = {
    "conv1": "conv1",
    "conv2": "conv2",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
    "layer_norm": "layer_norm",
}
PARTS = {
    "self_attention/linear_0": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "self_attention/linear_1": ("self_attn", ("out_proj",)),
    "attention/linear_0": ("encoder_attn", ("q_proj",)),
    "attention/linear_1": ("encoder_attn", ("k_proj", "v_proj")),
    "attention/linear_2": ("encoder_attn", ("out_proj",)),
}
SUFFIXES = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}


def convert(source: Path, target: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json and weights to a new folder.

    Args:
        source: folder with config.json, model.bin and tokenizer.json.
    """
    target.mkdir(parents=True)
    found = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", **SIZES}
    generation = {
        "decoder_start_token_id": 50257,
        "eos_token_id": 50256,
        "pad_token_id": 50256,
        "bos_token_id": 50256,
        "no_timestamps_token_id": 50362,
        "is_multilingual": False,
        "return_timestamps": False,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "suppress_tokens": found["suppress_ids"],
        "begin_suppress_tokens": found["suppress_ids_begin"],
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (target / name).write_text(json.dumps(content), encoding="utf-8")
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    with (source / "model.bin").open("rb") as file:
        tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in _renamed(file)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _renamed(file: BinaryIO) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in _variables(file):
        if array.ndim == 0:
            continue
        side, _, rest = name.partition("/")
        if rest.startswith("position_encodings"):
            yield f"model.{side}.embed_positions.weight", array
        elif rest.startswith("embeddings"):
            yield "model.decoder.embed_tokens.weight", array
        elif rest.startswith("projection"):
            continue  # tied to the embeddings
        else:
            yield from _of_layer(side, rest, array)


def _of_layer(side: str, rest: str, array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    place, _, last = rest.rpartition("/")
    at = f"model.{side}"
    if place.startswith("layer_") and not place.startswith("layer_norm"):
        layer, _, place = place.partition("/")
        at += f".layers.{layer.removeprefix('layer_')}"
    suffix = SUFFIXES[last]
    if place in PLAIN:
        yield f"{at}.{PLAIN[place]}.{suffix}", array
        return
    module, names = PARTS[place]
    for name, part in zip(names, np.split(array, len(names)), strict=True):
        if name == "k_proj" and suffix == "bias":
            assert not part.any(), "Whisper's keys have no bias"
            continue
        yield f"{at}.{module}.{name}.{suffix}", part


def _variables(file: BinaryIO) -> Iterator[tuple[str, NDArray[Any]]]:
    (version,) = _unpack(file, "<I")
    assert version >= 4, f"version {version} of the format"
    _text(file)
    _unpack(file, "<I")
    (count,) = _unpack(file, "<I")
    for _ in range(count):
        name = _text(file)
        (rank,) = _unpack(file, "<B")
        shape = _unpack(file, f"<{rank}I")
        kind, num_bytes = _unpack(file, "<BI")
        yield name, np.frombuffer(file.read(num_bytes), DTYPES[kind]).reshape(shape)


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<H")
    return file.read(length).rstrip(b"\0").decode()


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))
