"""The KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option
from quire.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class CacheConfig(Config):
    """Size and sharing of the KV cache."""

    block_size: int = option(16, "Tokens per KV cache block.", ge=1, le=1024)
    gpu_memory_utilization: float = option(
        0.92, "Share of the free memory of the device (or host, on a CPU) that quire may use.", gt=0.0, le=1.0
    )
    kv_cache_memory_bytes: int = option(0, "Exact size of the KV cache in bytes; 0: measured.", ge=0)
    num_gpu_blocks_override: int = option(0, "Exact number of KV cache blocks; 0: measured.", ge=0)
    enable_prefix_caching: bool = option(True, "Reuse the cache of a common prefix between requests.")
    disable_hybrid_kv_cache_manager: bool = option(
        False,
        "Keep blocks behind a window where a model has layers both with and without one; uses more memory.",
    )
    kv_cache_dtype: str = option(
        "auto",
        "Precision of the KV cache; auto: that of the activations, float32 on a CPU; "
        "int8: with a scale for each token and head.",
        choices=("auto", "float32", "float16", "bfloat16", "int8"),
    )
    swap_space: float = option(
        0.0,
        "GiB of host memory for blocks of preempted requests and of evicted prefixes; 0: none. "
        "On a CPU the KV cache could have them just as well.",
        ge=0.0,
        metavar="GIB",
    )
    preemption_mode: str = option(
        "auto",
        "What becomes of a preempted request's blocks: swap: copied to --swap-space if there is room; "
        "recompute: dropped; auto: the faster.",
        choices=("auto", "swap", "recompute"),
    )

    @property
    def swap_space_bytes(self) -> int:
        """Host memory for blocks."""
        return int(self.swap_space * GIB)

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ConfigError: names the options.
        """
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError("--preemption-mode swap needs --swap-space")
