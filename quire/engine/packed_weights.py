# SPDX-License-Identifier: Apache-2.0
"""Default directory of packed weights, which later starts map. Torch-free."""

from __future__ import annotations

from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ModelLoadError
from quire.kernels import cpu
from quire.models.bounded_directory import GIB, user_cache
from quire.models.registry import is_own_class
from quire.models.weight_files import companion_files, weight_files

MIN_BYTES = 64 * 2**20
"""Minimum bytes of weights: packing fewer takes some 0.1 s, too little for a file that was not requested."""


def default_packed_weights_cache(config: EngineConfig) -> tuple[str, str] | None:
    """Return the directory for a config with resolved model and device, and the reason; None: nothing is kept.

    Only models of quire's own code have one: another package's weights from the same files may change with the package.
    """
    load, cache = config.load, user_cache()
    if load.packed_weights_cache is not None or not load.enable_packed_weights_cache or cache is None:
        return None
    if config.device.device != "cpu" or not cpu.available() or not is_own_class(config.model_class):
        return None
    num_bytes = _weight_bytes(config)
    if not MIN_BYTES <= num_bytes <= load.packed_weights_cache_gib * GIB:
        return None
    reason = f"later starts map {num_bytes / GIB:.1f} GiB of weights instead of packing them"
    return str(cache / "quire" / "packed"), reason


def _weight_bytes(config: EngineConfig) -> int:
    if config.load.load_format == "dummy":
        return 0
    try:
        files = [*weight_files(Path(config.model_dir)), *companion_files(config.arch.part_of)]
        return sum(path.stat().st_size for path in files)
    except (ModelLoadError, OSError):  # the loader reports it in full
        return 0
