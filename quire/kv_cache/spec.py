"""What a layer needs of the KV cache, and how layers share blocks.

Invariant: plain frozen data. Layers declare specs, the core groups them, the worker allocates by them; nothing
is inferred from a layer's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.errors import ConfigError


@dataclass(frozen=True)
class KVCacheSpec:
    """Cache needs of one layer; `block_size` is in tokens."""

    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of every token are kept: 2 * kv heads * (head size * dtype bytes + scale bytes) per token."""

    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    scale_bytes: int = field(default=0, kw_only=True)
    """Bytes of each quantized vector's scale, which stands in the block too."""

    @property
    def block_bytes(self) -> int:
        vector_bytes = self.head_size * self.dtype_bytes + self.scale_bytes
        return 2 * self.block_size * self.num_kv_heads * vector_bytes


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Only the last `sliding_window` tokens are ever read."""

    sliding_window: int


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table; a block id means one block in each of them."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


@dataclass(frozen=True)
class SwapCosts:
    """What a preempted request costs on this machine: to copy its blocks, or to compute its tokens again."""

    copied_bytes_per_s: float = 4e9
    computed_tokens_per_s: float = 1e3


@dataclass(frozen=True)
class KVCacheConfig:
    """The cache of one worker: block 0 is the null block and is never given out.

    The host tier has `num_host_blocks` blocks beside its own, unused, null block.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    layer_specs: Mapping[str, KVCacheSpec]
    num_host_blocks: int = 0
    swap_costs: SwapCosts = SwapCosts()

    @property
    def bytes(self) -> int:
        return self.num_blocks * bytes_per_block(self.layer_specs)


def bytes_per_block(specs: Mapping[str, KVCacheSpec]) -> int:
    """Bytes that one block id costs over all layers (layers x 2 x kv heads x head size x block x dtype)."""
    return sum(spec.block_bytes for spec in specs.values())


def group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Put layers into groups; today all share one group, in which windowed layers keep their old blocks too.

    Raises:
        ConfigError: layers disagree on the block size.
    """
    sizes = {spec.block_size for spec in specs.values()}
    if len(sizes) != 1:
        raise ConfigError(f"all layers must use one KV block size, found {sorted(sizes)}")
    widest = next((s for s in specs.values() if type(s) is FullAttentionSpec), next(iter(specs.values())))
    return (KVCacheGroup(tuple(specs), widest),)
