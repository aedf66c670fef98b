# SPDX-License-Identifier: Apache-2.0
"""Facts about a model that its files state, without loading it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

from quire.errors import ModelLoadError
from quire.model_cache.cache import size_of_tree, size_text
from quire.models.checkpoint import read_model_config
from quire.models.gguf.model import GgufModel, is_gguf

MAX_HEADER_BYTES = 100_000_000  # As the format of safetensors limits it.
LENGTH_BYTES = 8


def facts_of(path: Path) -> dict[str, str]:
    """Return name -> fact of the model in a directory or GGUF file.

    Raises:
        ModelLoadError: the files cannot be read, or are of no model that quire runs.
    """
    arch = read_model_config(path, {})
    counts = numbers_by_type(path)
    total = sum(counts.values())
    types = (
        ", ".join(f"{name} {count / total:.0%}" for name, count in counts.most_common()) if total else "none"
    )
    facts = {
        "path": str(path),
        "architecture": arch.architecture,
        "size": size_text(size_of_tree(path)),
        "numbers": f"{total / 1e6:,.1f} million ({types})",
        "context": f"{arch.max_position_embeddings:,} tokens",
        "layers": str(arch.num_layers),
        "hidden size": str(arch.hidden_size),
        "heads": f"{arch.num_heads}, of keys and values {arch.num_kv_heads}, {arch.head_dim} wide",
        "vocabulary": f"{arch.vocab_size:,} tokens",
    }
    if arch.part_of is not None:
        facts["whole model"] = arch.part_of.architecture
    return facts


def numbers_by_type(path: Path) -> Counter[str]:
    """Return how many numbers a model's files store in each type.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    counts: Counter[str] = Counter()
    if is_gguf(path):
        for _, entry in GgufModel(path).tensors.values():
            counts[entry.type.name] += math.prod(entry.shape)
        return counts
    for file in sorted(path.glob("*.safetensors")):
        for dtype, shape in read_header(file).values():
            counts[dtype] += math.prod(shape)
    return counts


def read_header(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Return tensor -> dtype and shape, as a safetensors file's header has them.

    Raises:
        ModelLoadError: the file is truncated or malformed.
    """
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            if length > MAX_HEADER_BYTES:
                raise ModelLoadError(
                    f"{file}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed"
                )
            header = json.loads(opened.read(length))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: no safetensors file: {error}") from None
    is_header = isinstance(header, dict)
    entries = {name: one for name, one in header.items() if name != "__metadata__"} if is_header else {}
    if not is_header or not all(map(_is_entry, entries.values())):
        raise ModelLoadError(f"{file}: no safetensors file: its header lists no tensors with dtype and shape")
    return {name: (entry["dtype"], entry["shape"]) for name, entry in entries.items()}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape = entry.get("shape")
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
