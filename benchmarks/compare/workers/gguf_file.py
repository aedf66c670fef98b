# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint of a shape in `benchmarks/models` as a GGUF file in its own precision, bfloat16, for llama.cpp.

    python -m benchmarks.compare.workers.gguf_file CHECKPOINT TARGET [characters]

The file has no tokenizer, as llama.cpp's benchmarks feed token ids; or, for programs that read texts, that of
`workers.characters`. Vectors (norms and biases) and routers become float32, as llama.cpp expects; matrices keep their
bits. Experts of a layer stand in one tensor, whose first index is the expert.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.compare.workers.characters import NUM_RESERVED, text_of

ARCHITECTURES = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE}
"""By `model_type`."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


def write(checkpoint: Path, target: Path, *, characters: bool = False) -> None:
    """Convert a directory with `config.json` and one `model.safetensors`."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    add_sizes(writer, config)
    if architecture == gguf.MODEL_ARCH.QWEN3MOE:
        _add_expert_sizes(writer, config)
    if characters:
        _add_characters(writer, config["vocab_size"])
    else:
        writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, bits in stacked(bfloat16_tensors(checkpoint / "model.safetensors")):
        _add_tensor(writer, names.get_name(name, (".weight", ".bias")), bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bfloat16_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and bits (uint16) of every tensor of a safetensors file: a length, a JSON header, then the data."""
    data = np.memmap(path, np.uint8, "r")
    begin = 8 + int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8:begin])).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}, not BF16")
        first, last = (begin + offset for offset in entry["data_offsets"])
        yield name, data[first:last].view(np.uint16).reshape(entry["shape"])


def stacked(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """The same tensors, with those of a layer's experts as one, in the order of their numbers."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, bits in tensors:
        if found := _EXPERT.search(name):
            number = int(found[0].split(".")[2])
            experts.setdefault(_EXPERT.sub(".experts.", name), {})[number] = bits
        else:
            yield name, bits
    for name, by_number in experts.items():
        yield name, np.stack([by_number[number] for number in sorted(by_number)])


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as the float32 of the same value."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_expert_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_characters(writer: gguf.GGUFWriter, count: int) -> None:
    reserved = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text_of([index]) for index in range(count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types(reserved + [gguf.TokenType.NORMAL] * (count - NUM_RESERVED))
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(False)


def _add_tensor(writer: gguf.GGUFWriter, name: str, bits: np.ndarray) -> None:
    if bits.ndim == 1 or "ffn_gate_inp" in name:
        writer.add_tensor(name, widened(bits))
    else:
        writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), characters="characters" in sys.argv[3:])
