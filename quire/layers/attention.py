# SPDX-License-Identifier: Apache-2.0
"""Causal attention over the paged KV cache.

Shapes: T tokens of the step, P positions, Hq/Hkv query and key-value heads, D head size, B blocks.
Invariant: a layer never inspects the batch: owners of rows and blocks are in the `StepContext`, passed down by the
runner.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.attention_backends import AttentionNeeds, resolve_backend
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kv_cache.spec import (
    AttentionSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from quire.layers.attention_parts import CacheScales, Sinks, slopes
from quire.layers.base import DTYPES, Module, activation_dtype, device_type
from quire.layers.kv_cache import cache_planes, cache_users
from quire.layers.norm import RMSNorm
from quire.layers.relative_bias import RelativeBias
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import Shard, ShardSpan
from quire.layers.slot import length
from quire.layers.step import StepContext


class Attention(Module):
    """Causal attention of one decoder layer; its caches, laid out as in `quire.kernels.ops`, are bound after loading.

    `name` identifies the layer's cache and is unique in the model. `sliding_window` w: a token attends to itself and
    the w - 1 tokens before it. `soft_cap` c bounds scores to (-c, c). `rotary` rotates queries and keys; `qk_norm`,
    owned by the model, norms each head before that. `alibi` a lowers a score by a * slope * distance, with a slope per
    head. `attention_chunk` c: a token attends within its chunk of the sequence, cut at multiples of c. `sinks`, owned
    by the model, join every softmax. Heads come in `parts` of equal size, each of which is sharded. Unless
    `looks_ahead`, a token attends to earlier ones only, even where the step says that it sees more.

    Raises:
        ConfigError: the requested attention backend does not support this.
    """

    alibi_slopes: Tensor | None

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
        attention_chunk: int | None = None,
        soft_cap: float | None = None,
        rotary: RotaryEmbedding | None = None,
        qk_norm: tuple[RMSNorm, RMSNorm] | None = None,
        alibi: float | None = None,
        sinks: Sinks | None = None,
        parts: int = 1,
        looks_ahead: bool = True,
    ) -> None:
        super().__init__()
        assert parts == 1 or (alibi is None and sinks is None), (
            "ALiBi and sinks support heads in one part only"
        )
        self.name = name
        self.num_heads = num_heads
        self.num_kv_heads = self.all_kv_heads = num_kv_heads
        self.parts = parts
        self.looks_ahead = looks_ahead
        self.head_dim = head_dim
        self.scale = scale
        self.sliding_window = sliding_window
        self.attention_chunk = attention_chunk
        self.sinks = sinks
        self.soft_cap = soft_cap
        assert rotary is not None or qk_norm is None, "qk_norm is applied with the rotation and needs rotary"
        self.rotary = rotary
        self.qk_norm = qk_norm
        self.block_size = config.cache.block_size
        self.kv_dtype = kv_cache_dtype(config)
        needs = AttentionNeeds(
            device_type=device_type(config),
            dtype=activation_dtype(config),
            cache_dtype=self.kv_dtype,
            head_size=head_dim,
            has_soft_cap=soft_cap is not None,
            has_alibi=alibi is not None,
            has_sinks=sinks is not None,
            batch_invariant=config.kernels.batch_invariant,
        )
        self.backend_name, self.backend = resolve_backend(config.kernels.attention_backend, needs)
        self._attend = self.backend.load(needs)
        self.register_buffer(
            "alibi_slopes", None if alibi is None else alibi * slopes(num_heads), persistent=False
        )
        self.cache_scales: CacheScales | None = None
        """Divisors of keys and values in an E4M3 cache, if the checkpoint has them."""
        self.relative_bias: RelativeBias | None = None
        """Added to scores; owned and set by the model."""
        self.int8_scales: Tensor | None = None
        """Divisors in an int8 cache, float32 [2, Hkv]; None: each vector has its own."""
        self.k_cache = self.v_cache = torch.empty(0)
        self.group_id = 0

    def apply_shard(self, shard: Shard) -> None:
        heads = ShardSpan(self.num_heads // self.parts).piece(shard, self.name)
        kv_heads = ShardSpan(self.num_kv_heads // self.parts, replicated=True).piece(shard, self.name)
        self.num_heads, self.num_kv_heads = self.parts * length(heads), self.parts * length(kv_heads)
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes[heads]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]; stores k and v in the cache.

        With a rotary embedding, q and k are normed and rotated in place, and positions are [T].
        """
        slots = step.metadata(self.group_id, AttentionMetadata).slot_mapping
        self._write(q, k, v, slots, positions, step)
        return self.attend(q, step)

    def store(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k and v [T, Hkv, D] to slots [T] of the cache, without rotation."""
        ops.write_kv(k, v, self.k_cache, self.v_cache, slots, **self._given_scales())

    def attend(self, q: Tensor, step: StepContext, *, biased: bool = True) -> Tensor:
        """q [T, Hq, D], normed and rotated -> [T, Hq * D], over cached keys and values.

        Unless `biased`, the relative bias is left out.
        """
        own = step.metadata(self.group_id, AttentionMetadata)
        if own.last_seen is not None and not self.looks_ahead:
            own = replace(own, last_seen=None)
        # Backends of other packages may be older than the option.
        bias = {"relative_bias": self.relative_bias.table} if biased and self.relative_bias else {}
        out = self._attend(
            q if self.cache_scales is None else self.cache_scales.of_queries(q),
            self.k_cache,
            self.v_cache,
            own,
            self.scale,
            sliding_window=self.sliding_window,
            attention_chunk=self.attention_chunk,
            soft_cap=self.soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=None if self.sinks is None else self.sinks.weight,
            **bias,
        )
        return (out if self.cache_scales is None else self.cache_scales.of_outputs(out)).flatten(1)

    def _write(
        self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, step: StepContext
    ) -> None:
        if self.cache_scales is not None:
            self._turn(q, k, positions, step)
            k, v = self.cache_scales.stored(k, v)
        if self.cache_scales is not None or self.rotary is None:
            ops.write_kv(k, v, self.k_cache, self.v_cache, slots, **self._given_scales())
            return
        assert positions.dim() == 1, f"this rotary embedding takes positions [T], not {[*positions.shape]}"
        places, table = self.rotary.angles(positions, step)
        args = (places, q, k, v, table, self.k_cache, self.v_cache, slots)
        interleaved = self.rotary.interleaved
        if self.qk_norm is None:
            ops.rotary_and_write_kv(*args, interleaved, **self._given_scales())
        else:
            q_norm, k_norm = self.qk_norm
            norms = {"q_norm": q_norm.weight, "k_norm": k_norm.weight}
            ops.rotary_and_write_kv(*args, interleaved, **norms, eps=q_norm.eps, **self._given_scales())

    def _given_scales(self) -> dict[str, Any]:
        return {} if self.int8_scales is None else {"scales": self.int8_scales}

    def _turn(self, q: Tensor, k: Tensor, positions: Tensor, step: StepContext) -> None:
        """Norm and rotate q and k in place, as the kernel that also writes them does."""
        if self.qk_norm is not None:
            for heads, norm in zip((q, k), self.qk_norm, strict=True):
                heads.copy_(norm(heads))
        if self.rotary is not None:
            self.rotary(positions, q, k, step)

    def bind(self, group_id: int, spec: KVCacheSpec, tensor: Tensor) -> None:
        """See `CacheUser`; the first plane of a block holds keys, the second values."""
        assert isinstance(spec, AttentionSpec), f"attention has no place for {type(spec).__name__}"
        self.group_id = group_id
        keys, values = (plane.view(self.kv_dtype) for plane in cache_planes(spec, tensor))
        heads, size = spec.num_kv_heads, spec.head_size + spec.scale_bytes // spec.dtype_bytes
        if keys.device.type == "cpu":
            self.k_cache = keys.view(-1, heads, size, spec.kernel_block_size)
        else:
            self.k_cache = keys.view(-1, heads, spec.kernel_block_size, size).transpose(2, 3)
        self.v_cache = values.view(-1, heads, spec.kernel_block_size, size)

    def why_not_captured(self) -> str | None:
        """See `CacheUser`."""
        return None if self.backend.capturable else f"attention by {self.backend_name} cannot be captured"

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `CacheUser`."""
        sizes = (self.block_size, self.num_kv_heads, self.head_dim, self.kv_dtype.itemsize)
        scale_bytes = 4 if self.kv_dtype == torch.int8 else 0
        if self.attention_chunk is not None:
            return ChunkedLocalSpec(*sizes, self.attention_chunk, scale_bytes=scale_bytes)
        if self.sliding_window is not None:
            return SlidingWindowSpec(*sizes, self.sliding_window, scale_bytes=scale_bytes)
        return FullAttentionSpec(*sizes, scale_bytes=scale_bytes)


_CACHE_DTYPES = DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def kv_cache_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of cached keys and values: the activations' unless the config names another."""
    name, device = config.cache.kv_cache_dtype, device_type(config)
    if name == "fp8" and device == "cpu":
        raise ConfigError("--kv-cache-dtype fp8 needs a GPU; on a CPU there is int8")
    if name == "int8" and device != "cpu":
        raise ConfigError(
            f"--kv-cache-dtype int8 needs a CPU, and the device is {device}; on a GPU there is fp8"
        )
    if name == "int8" and config.arch.head_dim % 4:
        raise ConfigError(
            f"--kv-cache-dtype int8 needs a head size that is a multiple of 4; the model's is {config.arch.head_dim}"
        )
    return activation_dtype(config) if name == "auto" else _CACHE_DTYPES[name]


def attention_backends(model: nn.Module) -> list[str]:
    """Return names of the attention backends that the model's layers use."""
    names = (getattr(layer, "backend_name", None) for layer in cache_users(model))
    return [name for name in dict.fromkeys(names) if name is not None]
