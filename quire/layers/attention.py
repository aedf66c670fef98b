"""Attention over the paged KV cache.

Shapes: T tokens of the step, Hq/Hkv query and key-value heads, D head size, B blocks.
Invariant: a layer never looks at the batch itself: who owns which rows and blocks is in `AttentionMetadata`, which is
handed down from the runner.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from quire.layers.base import DTYPES, Module, activation_dtype
from quire.layers.rotary import RotaryEmbedding


class Attention(Module):
    """Causal attention of one decoder layer; its caches, laid out as `quire.kernels.ops` says, are bound after loading.

    `name` identifies the layer's cache and is unique in the model. `sliding_window` w lets a token see itself and the
    w - 1 tokens before it; `soft_cap` c bounds scores to (-c, c). With `rotary`, queries and keys are rotated first.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        name: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        rotary: RotaryEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.rotary = rotary
        self.block_size = config.cache.block_size
        self.kv_dtype = kv_cache_dtype(config)
        self.k_cache = self.v_cache = torch.empty(0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, positions: Tensor | None = None
    ) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]; k and v are in the cache afterwards.

        `positions` [T] are wanted by a layer with a rotary embedding, which rotates q and k in place.
        """
        self._write(q, k, v, metadata.slot_mapping, positions)
        out = ops.paged_attention(
            q,
            self.k_cache,
            self.v_cache,
            metadata,
            self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )
        return out.flatten(1)

    def _write(self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor | None) -> None:
        if self.rotary is None:
            ops.write_kv(k, v, self.k_cache, self.v_cache, slots)
            return
        assert positions is not None, "a rotary embedding needs positions"
        table = self.rotary.cos_sin_cache
        ops.rotary_and_write_kv(positions, q, k, v, table, self.k_cache, self.v_cache, slots)

    def kv_cache_spec(self) -> KVCacheSpec:
        """What this layer needs of the cache."""
        sizes = (self.block_size, self.num_kv_heads, self.head_dim, self.kv_dtype.itemsize)
        scale_bytes = 4 if self.kv_dtype == torch.int8 else 0
        if self.sliding_window is None:
            return FullAttentionSpec(*sizes, scale_bytes=scale_bytes)
        return SlidingWindowSpec(*sizes, self.sliding_window, scale_bytes=scale_bytes)


_CACHE_DTYPES = DTYPES | {"int8": torch.int8}


def kv_cache_dtype(config: EngineConfig) -> torch.dtype:
    """The precision of cached keys and values; that of the activations unless the config names another."""
    name = config.cache.kv_cache_dtype
    if name == "int8" and config.arch.head_dim % 4:
        raise ConfigError(
            f"--kv-cache-dtype int8 needs a head size that is a multiple of 4; the model's is {config.arch.head_dim}"
        )
    return activation_dtype(config) if name == "auto" else _CACHE_DTYPES[name]


def kv_cache_specs(model: nn.Module) -> dict[str, KVCacheSpec]:
    """Layer name -> what it needs of the cache, from the first layer to the last."""
    return {layer.name: layer.kv_cache_spec() for layer in _attention_layers(model)}


def kv_cache_shape(spec: FullAttentionSpec, num_blocks: int) -> tuple[int, ...]:
    """The shape of one layer's cache, to be allocated in `kv_cache_dtype`."""
    size = spec.head_size + spec.scale_bytes // spec.dtype_bytes
    return (2, num_blocks, spec.num_kv_heads, spec.block_size, size)


def bind_kv_cache(model: nn.Module, caches: Mapping[str, Tensor]) -> None:
    """Give each layer its cache: layer name -> contiguous tensor of `kv_cache_shape`, keys first."""
    layers = {layer.name: layer for layer in _attention_layers(model)}
    assert layers.keys() == caches.keys(), "one cache per attention layer"
    for name, cache in caches.items():
        keys, values = cache.unbind()
        blocks, heads, block_size, size = keys.shape
        layers[name].k_cache, layers[name].v_cache = keys.view(blocks, heads, size, block_size), values


def _attention_layers(model: nn.Module) -> Iterator[Attention]:
    return (module for module in model.modules() if isinstance(module, Attention))
