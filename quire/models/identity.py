# SPDX-License-Identifier: Apache-2.0
"""Options and checkpoint identity that cooperating processes must have in common.

Invariant: torch-free, and computed without reading the weights.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import msgspec

from quire.config import EngineConfig
from quire.config.engine import engine_fields
from quire.config.fields import flag_of
from quire.models.file_digests import checkpoint_fingerprint, files_fingerprint
from quire.models.weight_files import companion_files

PER_HOST_FIELDS = frozenset(
    {
        *(
            "model",
            "tokenizer",
            "served_model_name",
            "download_dir",
            "packed_weights_cache",
            "packed_weights_cache_gib",
            "enable_packed_weights_cache",
            "generation_config",
        ),
        *("node_rank", "cpu_threads", "cpu_numa", "log_level", "log_format", "record_trace"),
    }
)
"""Fields that may differ between hosts: file locations, processors, and those that only the first host reads."""
PLANNING_FIELDS = frozenset({"max_mixed_step_s"})
"""Fields that ranks without a scheduler never read, and whose default depends on what starts the scheduler."""


def options_of(config: EngineConfig, but: Set[str] = frozenset()) -> dict[str, bytes]:
    """Return flag -> encoded option of a prepared config that all processes must share, except the fields `but`."""
    return {
        flag_of(name): msgspec.json.encode(getattr(getattr(config, child), name))
        for name, (child, _) in engine_fields().items()
        if name not in PER_HOST_FIELDS | but
    }


def model_of(config: EngineConfig) -> dict[str, bytes]:
    """Return what identifies the model and its draft model."""
    facts = _model(config)
    return facts if config.draft is None else facts | _model(config.draft, "draft ")


def _model(config: EngineConfig, kind: str = "") -> dict[str, bytes]:
    read = config.model_arch, config.model_class, config.pooling
    return {
        f"{kind}model's config.json": msgspec.json.encode(read),
        f"{kind}checkpoint": checkpoint_fingerprint(Path(config.model_dir)),
        f"{kind}companions of the checkpoint": files_fingerprint(companion_files(config.arch.part_of)),
    }
