"""What processes that compute one model, or the same one, must have in common, wherever they are.

Invariant: torch-free, and read without the weights.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import msgspec

from quire.config import EngineConfig
from quire.config.engine import engine_fields
from quire.config.fields import flag_of
from quire.models.fingerprint import checkpoint_fingerprint

OF_EACH_HOST = frozenset(
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
"""Fields that may differ: where a host has its files, what it has of processors, and what only the first one reads."""


def options_of(config: EngineConfig, but: Set[str] = frozenset()) -> dict[str, bytes]:
    """By flag, each option of a prepared config that all must have alike, less those of some fields."""
    return {
        flag_of(name): msgspec.json.encode(getattr(getattr(config, child), name))
        for name, (child, _) in engine_fields().items()
        if name not in OF_EACH_HOST | but
    }


def model_of(config: EngineConfig) -> dict[str, bytes]:
    """What tells the model from any other, and that which guesses for it."""
    facts = _model(config)
    return facts if config.draft is None else facts | _model(config.draft, "draft ")


def _model(config: EngineConfig, kind: str = "") -> dict[str, bytes]:
    read = config.model_arch, config.model_class, config.pooling
    return {
        f"{kind}model's config.json": msgspec.json.encode(read),
        f"{kind}checkpoint": checkpoint_fingerprint(Path(config.model_dir)),
    }
