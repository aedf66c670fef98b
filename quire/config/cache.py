"""The KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option
from quire.errors import ConfigError

GIB = 2**30
MAX_SHARE = 0.92
"""Of the memory, unless another is given; the rest is for what nobody can count."""


@dataclass(frozen=True)
class CacheConfig(Config):
    """Size and sharing of the KV cache."""

    block_size: int = option(16, "Tokens per KV cache block.", ge=1, le=1024)
    gpu_memory_utilization: float | None = option(
        None,
        "Share of a GPU's memory, weights included (default: 0.92), or on a CPU of what is free after loading "
        "(default: 0.5).",
        gt=0.0,
        le=1.0,
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
        "Precision of the KV cache; auto: that of the activations; int8 (CPU): with a scale for each token and head; "
        "fp8 (GPU): E4M3.",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8"),
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
    def memory_share(self) -> float:
        """The most of the memory that may be used."""
        return MAX_SHARE if self.gpu_memory_utilization is None else self.gpu_memory_utilization

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
