# SPDX-License-Identifier: Apache-2.0
"""Namespace of a worker's rows: everything that their bytes depend on besides tokens.

Invariant: whatever moves a bit of the cache is here; whatever does not (threads, batch, chunks) is not, so that rows
are found again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.kernels.cpu import library
from quire.kv_cache.spec import KVCacheConfig
from quire.kv_store.row_store import Namespace
from quire.layers.shard import Shard
from quire.models.bounded_directory import user_cache
from quire.models.file_digests import FileDigests
from quire.models.stages import Stage
from quire.models.weight_files import companion_files, weight_files
from quire.version import __version__

LAYOUT = "1"


def namespace_of(config: EngineConfig, kv_config: KVCacheConfig, shard: Shard, stage: Stage) -> Namespace:
    """Return the namespace of the rows of one worker, from its prepared config."""
    return Namespace(values_of(config, kv_config, shard, stage), sum(kv_config.tensor_block_bytes))


def values_of(config: EngineConfig, kv_config: KVCacheConfig, shard: Shard, stage: Stage) -> dict[str, str]:
    """Return the values that make up a namespace, by name."""
    values = {
        "layout": LAYOUT,
        "model": config.arch.architecture,
        "software": _software(config),
        "dtype": config.model.dtype,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "block_size": str(kv_config.block_size),
        "cache": _digest({name: msgspec.to_builtins(spec) for name, spec in kv_config.layer_specs.items()}),
        "quantization": _json(config.quantization),
        "kernels": _json(config.kernels),
        "rank": f"{shard.rank} of {shard.of}, stage {stage.index} of {stage.of}",
        "ranks": f"tp_invariant={config.parallel.tp_invariant}",
        **({} if sys.byteorder == "little" else {"byte_order": sys.byteorder}),
        **_of_model(config, ""),
    }
    return values | (_of_model(config.draft, "draft_") if config.draft is not None else {})


def _of_model(config: EngineConfig, prefix: str) -> dict[str, str]:
    """Return the digests of a model's weights and architecture.

    Rotary embeddings may depend on whether `max_model_len` exceeds the original context, for all positions.
    """
    arch = msgspec.to_builtins(config.arch, builtin_types=(bytes,))
    arch.pop("generation", None)
    original = config.arch.rope.original_max_position if config.arch.rope else 0
    return {
        f"{prefix}weights": weights_digest(config),
        f"{prefix}arch": _digest(arch),
        f"{prefix}beyond_original_context": str(bool(original and config.model.max_model_len > original)),
    }


def _software(config: EngineConfig) -> str:
    import torch

    if config.device.device == "cpu":
        native = library.loaded()
        kernels = f"torch {torch.__version__}" if native is None else f"{native.isa} kernels"
        return f"quire {__version__}, {kernels}"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else config.device.device
    return f"quire {__version__}, torch {torch.__version__}, {name}"


def weights_digest(config: EngineConfig) -> str:
    """Return a digest over all bytes of a model's weights; each file is read once and its digest remembered."""
    if config.load.load_format == "dummy":
        return "dummy"
    digest = hashlib.sha256()
    remembered = FileDigests(user_cache())
    for path in [*weight_files(Path(config.model_dir)), *companion_files(config.arch.part_of)]:
        digest.update(remembered.digest_of(path).encode())
    return digest.hexdigest()[:32]


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:32]
