"""What ranks compare before they begin, so that two that would not compute the same model never do."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quire.config import EngineConfig
from quire.config.engine import engine_fields
from quire.config.fields import flag_of
from quire.distributed.agreement import check_same
from quire.distributed.group import Group
from quire.models.fingerprint import checkpoint_fingerprint
from quire.version import __version__

OF_EACH_HOST = frozenset(
    {
        *(
            "model",
            "tokenizer",
            "served_model_name",
            "download_dir",
            "packed_weights_cache",
            "generation_config",
        ),
        *("node_rank", "cpu_threads", "cpu_numa", "log_level", "log_format", "record_trace"),
    }
)
"""Fields that may differ: where a host has its files, what it has of processors, and what only the first one reads."""


def check_ranks_agree(group: Group, config: EngineConfig) -> None:
    """Every rank must be of the same version, configuration and checkpoint.

    Raises:
        StartupError: names the option, or whatever it is, and the ranks that have another than rank 0.
    """
    check_same(group, {"version of quire": __version__.encode()})  # each says what there is to compare next
    check_same(group, _options(config))
    check_same(
        group, _model(config) if config.draft is None else _model(config) | _model(config.draft, "draft ")
    )


def _options(config: EngineConfig) -> dict[str, bytes]:
    return {
        flag_of(name): msgspec.json.encode(getattr(getattr(config, child), name))
        for name, (child, _) in engine_fields().items()
        if name not in OF_EACH_HOST
    }


def _model(config: EngineConfig, kind: str = "") -> dict[str, bytes]:
    read = config.model_arch, config.model_class, config.pooling
    return {
        f"{kind}model's config.json": msgspec.json.encode(read),
        f"{kind}checkpoint": checkpoint_fingerprint(Path(config.model_dir)),
    }
