# SPDX-License-Identifier: Apache-2.0
"""Writer of whisper.cpp's model files, from a Whisper checkpoint in transformers' form.

A file has eleven sizes, the mel filters, the tokens' bytes, and tensors: the number of dimensions, the name's length
and the type of the numbers, the dimensions from the innermost on, the name, the numbers. Q8_0 has a half-precision
scale and 32 integers for each 32 numbers of a row.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from quire.speech.features import mel_filters

_MAGIC = 0x67676D6C
_FLOAT, _HALF, _Q8_0 = 0, 1, 8
_FILE_TYPES = {"f16": 1, "q8_0": 2007}  # version 2 of the quantized layouts, and 7: mostly Q8_0
_BLOCK = 32
_NAMES = {
    "layers": "blocks",
    "self_attn": "attn",
    "encoder_attn": "cross_attn",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln",
    "embed_tokens": "token_embedding",
}
_ENDS = {
    "encoder.layer_norm": "encoder.ln_post",
    "decoder.layer_norm": "decoder.ln",
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
}


def convert(source: Path, target: Path, kind: str) -> None:
    """Write a checkpoint's folder as one file with weights of a kind, "f16" or "q8_0"."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    with target.open("wb") as file:
        file.write(struct.pack("<12i", _MAGIC, *_sizes(config), _FILE_TYPES[kind]))
        filters = mel_filters(config["num_mel_bins"]).T.astype("<f4")
        file.write(struct.pack("<2i", *filters.shape) + filters.tobytes())
        tokens = list(_tokens(source / "tokenizer.json"))
        file.write(struct.pack("<i", len(tokens)))
        for token in tokens:
            file.write(struct.pack("<i", len(token)) + token)
        for name, tensor in load_file(source / "model.safetensors").items():
            _write(file, _renamed(name), tensor, kind)


def _sizes(config: dict[str, Any]) -> list[int]:
    """Return the vocabulary, and of encoder and decoder each positions, width, heads and layers; and mel bins."""
    sides = [
        [config[positions], config["d_model"], config[f"{side}_attention_heads"], config[f"{side}_layers"]]
        for side, positions in (("encoder", "max_source_positions"), ("decoder", "max_target_positions"))
    ]
    return [config["vocab_size"], *sides[0], *sides[1], config["num_mel_bins"]]


def _tokens(path: Path) -> Iterator[bytes]:
    """Yield the bytes of all tokens below the special ones, which GPT-2's vocabulary writes as printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + place): byte for place, byte in enumerate(others)}
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    added = {one["id"] for one in tokenizer["added_tokens"]}
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    for text, number in vocab:
        if number not in added:
            yield bytes(byte_of[character] for character in text)


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, own in _ENDS.items():
        if name.startswith(theirs):
            return name.replace(theirs, own, 1)
    return ".".join(_NAMES.get(part, part) for part in name.split("."))


def _write(file: BinaryIO, name: str, tensor: NDArray[Any], kind: str) -> None:
    is_float = tensor.ndim < 2 or "positional" in name
    if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
        tensor = tensor[:, None]
    is_rounded = kind == "q8_0" and tensor.ndim == 2 and not is_float
    code = _FLOAT if is_float else _Q8_0 if is_rounded else _HALF
    data = _rounded(tensor) if is_rounded else tensor.astype("<f4" if is_float else "<f2").tobytes()
    encoded = name.encode()
    file.write(struct.pack("<3i", tensor.ndim, len(encoded), code))
    file.write(struct.pack(f"<{tensor.ndim}i", *reversed(tensor.shape)))
    file.write(encoded + data)


def _rounded(tensor: NDArray[Any]) -> bytes:
    """Return the blocks of a weight [N, K] in Q8_0."""
    blocks = tensor.astype(np.float32).reshape(-1, _BLOCK)
    scales = np.abs(blocks).max(1, keepdims=True) / 127
    codes = np.rint(blocks / np.where(scales == 0, 1, scales)).astype(np.int8)
    made = np.empty(len(blocks), dtype=[("scale", "<f2"), ("codes", "i1", _BLOCK)])
    made["scale"], made["codes"] = scales[:, 0], codes
    return made.tobytes()
