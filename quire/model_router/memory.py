# SPDX-License-Identifier: Apache-2.0
"""Memory of a model's server, estimated from its files before it is loaded.

Invariant: torch-free. Every number is one that `quire serve` is then held to (the KV cache), or an upper estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.config import ModelArch
from quire.errors import ModelLoadError
from quire.model_router.models_file import ModelEntry
from quire.model_router.planner import MIB, Size
from quire.models.checkpoint import read_model_config, resolve_model_dir
from quire.models.weight_files import companion_files, weight_files

PROCESS_BYTES = 320 * MIB  # Both processes of a server with torch, without a model (270 MiB measured).
KV_SHARE = 8  # The default KV cache is at most this part of the memory for models.
MIN_KV_BYTES = 64 * MIB
NUM_SEQS, NUM_TOKENS = 128, 2048  # Defaults of --max-num-seqs and --max-num-batched-tokens.
LOGITS_ELEMENTS = 1 << 23  # Most logits at once, in three arrays.
FLOAT_BYTES = 4
GAPS = 1.25  # Size of an arena over the tensors in it.
WEIGHT_SLACK = 1.05  # Packed weights over those of the files.


@dataclass(frozen=True)
class Estimate:
    """Parts of a server's memory in bytes.

    Attributes:
        step_bytes: peak of a step's tensors.
        max_model_len: longest context in tokens, if the KV cache holds it.
        total_bytes: as the file says, if it does; None: the sum of the parts.
    """

    weight_bytes: int
    kv_cache_bytes: int
    step_bytes: int
    total_bytes: int | None = None
    max_model_len: int = 0

    @property
    def size(self) -> Size:
        """Memory while it serves; and while it sleeps, when the KV cache and the tensors of steps are given back."""
        given_back = self.kv_cache_bytes + self.step_bytes
        needed = self.total_bytes or PROCESS_BYTES + self.weight_bytes + given_back
        return Size(needed, max(0, needed - given_back))


def estimate(entry: ModelEntry, limit_bytes: int) -> Estimate:
    """Return the memory of a model's server; a model of the hub is downloaded first.

    Args:
        limit_bytes: memory for all models, by which the default KV cache is chosen.

    Raises:
        ModelLoadError: the model is missing or its files are malformed.
    """
    options = entry.options
    directory = resolve_model_dir(entry.model, options.get("revision"), options.get("download-dir"))
    arch = read_model_config(
        directory,
        options.get("hf-overrides") or {},
        options.get("model-impl") or "auto",
        options.get("download-dir"),
    )
    kv_bytes = entry.kv_cache_bytes or default_kv_cache_bytes(arch, entry, limit_bytes)
    return Estimate(
        _weight_bytes(directory, arch, entry),
        kv_bytes,
        _step_bytes(arch, entry),
        entry.memory_bytes,
        _context(arch, entry),
    )


def default_kv_cache_bytes(arch: ModelArch, entry: ModelEntry, limit_bytes: int) -> int:
    """Return what all requests of full length can use, at most a part of the memory for models."""
    per_token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * FLOAT_BYTES
    useful = _number(entry, "max-num-seqs", NUM_SEQS) * _context(arch, entry) * per_token
    return max(MIN_KV_BYTES, min(useful, limit_bytes // KV_SHARE))


def _context(arch: ModelArch, entry: ModelEntry) -> int:
    return _number(entry, "max-model-len", arch.max_position_embeddings)


def _weight_bytes(directory: Path, arch: ModelArch, entry: ModelEntry) -> int:
    """Return the bytes of the files, doubled if 16-bit values are widened."""
    if entry.options.get("load-format") == "dummy":
        if entry.memory_bytes is None:
            raise ModelLoadError(
                "weights of --load-format dummy have no files; give the model the key 'memory'"
            )
        return 0
    widened = entry.options.get("dtype") in ("float32", "float") and arch.dtype in ("bfloat16", "float16")
    files = [*weight_files(directory), *companion_files(arch.part_of)]
    num_bytes = sum(path.stat().st_size for path in files)
    return int(num_bytes * (2 if widened else 1) * WEIGHT_SLACK)


def _step_bytes(arch: ModelArch, entry: ModelEntry) -> int:
    heads = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    per_token = FLOAT_BYTES * (4 * arch.hidden_size + 2 * arch.intermediate_size + heads)
    num_seqs = _number(entry, "max-num-seqs", NUM_SEQS)
    logits = 3 * FLOAT_BYTES * min(num_seqs * arch.vocab_size, LOGITS_ELEMENTS)
    tokens = _number(entry, "max-num-batched-tokens", NUM_TOKENS)
    recorded = 2 * max(num_seqs, min(NUM_SEQS, tokens))
    return int(GAPS * ((tokens + recorded) * per_token + logits))


def _number(entry: ModelEntry, flag: str, default: int) -> int:
    value = entry.options.get(flag)
    return value if isinstance(value, int) and value > 0 else default
