# SPDX-License-Identifier: Apache-2.0
"""Namespace of a worker's rows: everything that their bytes depend on besides tokens.

Invariant: whatever moves a bit of the cache is here; whatever does not (threads, batch, chunks) is not, so that rows
are found again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine.packed_weights import user_cache
from quire.kernels.cpu import library
from quire.kv_cache.spec import KVCacheConfig
from quire.kv_store.row_store import Namespace
from quire.layers.shard import Shard
from quire.models.bounded_directory import BoundedDirectory
from quire.models.stages import Stage
from quire.models.weight_files import weight_files
from quire.version import __version__

logger = logging.getLogger(__name__)

LAYOUT = "1"
DIGITS = 64
MOST_BYTES = 2**20


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
    remembered = _Remembered()
    for path in weight_files(Path(config.model_dir)):
        digest.update(remembered.digest_of(path).encode())
    return digest.hexdigest()[:32]


class _Remembered:
    """Digests of files, remembered in the user's cache by path, size, times and inode."""

    def __init__(self) -> None:
        cache = user_cache()
        self._directory = (
            None if cache is None else BoundedDirectory(cache / "quire" / "digests", "sha256", MOST_BYTES)
        )

    def digest_of(self, path: Path) -> str:
        if self._directory is None:
            return _digest_of_file(path)
        status = path.stat()
        state = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        place = self._directory.place("weights", hashlib.sha256(repr(state).encode()).hexdigest())
        try:
            known = place.read_text(errors="replace")
            if len(known) == DIGITS:
                return known
        except OSError:  # it is not known yet, or cannot be read and is made anew
            pass
        known = _digest_of_file(path)
        try:
            with self._directory.new_file(place, DIGITS) as file:
                file.write(known.encode())
        except OSError as error:
            logger.info("the digest of %s is not remembered: %s", path.name, error)
        return known


def _digest_of_file(path: Path) -> str:
    logger.info("reading %s for its digest, once", path.name)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:32]
