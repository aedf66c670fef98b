# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over the paged cache, and its block (MLA; DeepSeek-V2, 2024, arXiv:2405.04434).

Shapes: T tokens of the step, H hidden size, Hq heads, R rank of the latents, D rotated dimensions.
Invariant: every step, prefill too, attends in the absorbed form, so that results do not depend on how a prompt is
chunked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import LatentArch
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kv_cache.spec import KVCacheSpec, LatentAttentionSpec
from quire.layers.attention import kv_cache_dtype
from quire.layers.base import Module, RowSource, activation_dtype, device_type, model_dtype
from quire.layers.kv_cache import cache_planes
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.per_head_linear import PerHeadLinear
from quire.layers.rotary import RotaryEmbedding, Unrotated
from quire.layers.shard import ShardSpan
from quire.layers.step import StepContext


class LatentAttention(Module):
    """Causal attention of one layer over its latents; its cache, laid out as in `quire.kernels.ops`, is bound after
    loading.

    `name` identifies the layer's cache and is unique in the model. `norm`, owned by the model, is that of latents.
    Without `rotary` nothing is rotated.

    Raises:
        ConfigError: the requested attention backend or cache dtype is not available.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        name: str,
        latent: LatentArch,
        scale: float,
        rotary: RotaryEmbedding | None,
        norm: RMSNorm,
    ) -> None:
        super().__init__()
        self.name = name
        self.size = latent.rank + latent.rope_size
        self.scale = scale
        self.rotary = Unrotated(latent.rope_size) if rotary is None else rotary
        self.norm = norm
        self.block_size = config.cache.block_size
        self.kv_dtype = _cache_dtype(config)
        self.backend_name, self._attend = _backend(config)
        self.cache = torch.empty(0)
        self.group_id = 0

    def forward(
        self, q: Tensor, q_rope: Tensor, rows: Tensor, positions: Tensor, step: StepContext
    ) -> Tensor:
        """q [T, Hq, R], q_rope [T, Hq, D], and rows [T, R + D], raw latents and keys -> [T, Hq, R].

        Stores the normed latents and rotated keys in the cache; rotates q_rope in place.
        """
        assert positions.dim() == 1, f"this rotary embedding takes positions [T], not {[*positions.shape]}"
        own = step.metadata(self.group_id, AttentionMetadata)
        ops.write_latents(
            self.rotary.places(positions),
            q_rope,
            rows,
            self.norm.weight,
            self.rotary.cos_sin_cache,
            self.cache,
            own.slot_mapping,
            self.norm.eps,
            self.rotary.interleaved,
        )
        return self._attend(q, q_rope, self.cache, own, self.scale)

    def bind(self, group_id: int, spec: KVCacheSpec, tensor: Tensor) -> None:
        """See `CacheUser`; a block holds a vector for each of its tokens."""
        assert isinstance(spec, LatentAttentionSpec), f"latents have no place in {type(spec).__name__}"
        self.group_id = group_id
        (latents,) = cache_planes(spec, tensor)
        self.cache = latents.view(self.kv_dtype).view(-1, spec.kernel_block_size, self.size)

    def why_not_captured(self) -> str | None:
        """See `CacheUser`."""
        return (
            "latent attention by reference cannot be captured" if self.backend_name == "reference" else None
        )

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `CacheUser`."""
        return LatentAttentionSpec(self.block_size, 1, self.size, self.kv_dtype.itemsize)


def _cache_dtype(config: EngineConfig) -> torch.dtype:
    name = config.cache.kv_cache_dtype
    if name in ("int8", "fp8"):
        raise ConfigError(
            f"--kv-cache-dtype {name} is not supported with latent attention, whose cache is small already;"
            " give bfloat16 or float16"
        )
    return kv_cache_dtype(config)


def _backend(config: EngineConfig) -> tuple[str, Callable[..., Tensor]]:
    """Return name and function of the attention backend."""
    rows = ops.latent_attention.supporting(device_type(config), activation_dtype(config))
    known = {row.name: row.load for row in rows} | {"reference": lambda: ops.latent_attention.oracle}
    asked = config.kernels.attention_backend
    name = next(iter(known)) if asked == "auto" else asked
    if name not in known:
        raise ConfigError(
            f"--attention-backend {name} cannot be used here: latent attention has {', '.join(known)}"
        )
    if name == "reference" and config.kernels.batch_invariant:
        raise ConfigError(
            "latent attention is computed by reference here: its sums depend on the batch, and --batch-invariant"
            " forbids that"
        )
    return name, known[name]()


_NORM_EPS = 1e-6
"""Epsilon of the norms of compressed queries and latents, whatever the model's other norms have."""


class LatentSelfAttention(Module):
    """Attention block whose keys and values derive from a token's latent, with absorbed projections.

    `k_up` is absorbed into the queries, which then attend to the latents, and `v_up` is applied to the output.
    """

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, latent, dtype = config.arch, config.arch.latent, model_dtype(config)
        assert latent is not None, "the model has a latent attention config"
        self.sizes = [latent.key_size, latent.rope_size]
        self.query_rank = latent.query_rank or 0
        queries = Linear(
            in_features=latent.query_rank or arch.hidden_size,
            out_features=arch.num_heads * latent.query_size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.q_b_proj" if latent.query_rank else f"{prefix}.q_proj",
            partition="output",
            spans=(ShardSpan(arch.num_heads, latent.query_size),),
        )
        self.q_proj = self.q_b_proj = self.q_a_layernorm = None
        if latent.query_rank is None:
            self.q_proj = queries
        else:
            self.q_b_proj = queries
            self.q_a_layernorm = _norm(config, latent.query_rank, f"{prefix}.q_a_layernorm")
        compressed = latent.rank + latent.rope_size
        self.qkv_a_proj = Linear(
            in_features=arch.hidden_size,
            out_features=self.query_rank + compressed,
            bias=arch.attention_bias,
            dtype=dtype,
            name=f"{prefix}.qkv_a_proj",
            spans=(ShardSpan(latent.query_rank), ShardSpan(compressed))
            if latent.query_rank
            else (ShardSpan(compressed),),
        )
        self.kv_a_layernorm = _norm(config, latent.rank, f"{prefix}.kv_a_layernorm")
        self.k_up = PerHeadLinear(
            num_heads=arch.num_heads,
            in_features=latent.key_size,
            out_features=latent.rank,
            dtype=dtype,
            name=f"{prefix}.k_up",
            after=0 if latent.absorbed else latent.value_size,
            inverted=not latent.absorbed,
        )
        self.v_up = PerHeadLinear(
            num_heads=arch.num_heads,
            in_features=latent.rank,
            out_features=latent.value_size,
            dtype=dtype,
            name=f"{prefix}.v_up",
            before=0 if latent.absorbed else latent.key_size,
        )
        self.g_proj: Linear | None = None
        if latent.gated:
            self.g_proj = Linear(
                in_features=arch.hidden_size,
                out_features=arch.num_heads,
                bias=False,
                dtype=dtype,
                name=f"{prefix}.g_proj",
                partition="output",
                spans=(ShardSpan(arch.num_heads),),
                activation="sigmoid",
            )
        self.o_proj = Linear(
            in_features=arch.num_heads * latent.value_size,
            out_features=arch.hidden_size,
            bias=arch.attention_out_bias,
            dtype=dtype,
            name=f"{prefix}.o_proj",
            partition="input",
        )
        self.attn = LatentAttention(
            config=config,
            name=f"{prefix}.attn",
            latent=latent,
            scale=latent.query_size**-0.5 if arch.attention_scale is None else arch.attention_scale,
            rotary=rotary,
            norm=self.kv_a_layernorm,
        )

    def reads(self, source: RowSource) -> None:
        """See `Linear.reads`; if queries or gates are computed from x directly, x has other readers."""
        if self.q_proj is None and self.g_proj is None:
            self.qkv_a_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        compressed = self.qkv_a_proj(x, step)
        queries = self._queries(x, compressed[:, : self.query_rank], step)
        q, q_rope = queries.view(len(queries), -1, sum(self.sizes)).split(self.sizes, 2)
        latents = self.attn(self.k_up(q, step), q_rope, compressed[:, self.query_rank :], positions, step)
        out = self.v_up(latents, step)
        if self.g_proj is not None:
            out = out * self.g_proj(x, step).unsqueeze(2)
        return self.o_proj(out.flatten(1), step)

    def _queries(self, x: Tensor, compressed: Tensor, step: StepContext) -> Tensor:
        """Return queries [T, Hq * query size]."""
        if self.q_proj is not None:
            return self.q_proj(x, step)
        assert self.q_b_proj is not None
        assert self.q_a_layernorm is not None
        return self.q_b_proj(self.q_a_layernorm(compressed), step)


def _norm(config: EngineConfig, size: int, name: str) -> RMSNorm:
    return RMSNorm(size=size, eps=_NORM_EPS, dtype=activation_dtype(config), name=name)
