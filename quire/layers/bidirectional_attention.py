# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention of encoders, within the one step that computes all tokens of a text.

Shapes: T tokens of the step, Hq/Hkv query and key-value heads, D head size, P positions.
Invariant: nothing is kept from step to step, and a layer never inspects the batch; see `quire.layers.attention`.
"""

from __future__ import annotations

from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.kernels.attention_metadata import GroupMetadata
from quire.kv_cache.spec import EncoderOnlySpec, KVCacheSpec
from quire.layers.attention_parts import slopes
from quire.layers.base import Module, activation_dtype, device_type
from quire.layers.norm import RMSNorm
from quire.layers.relative_bias import RelativeBias
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import Shard, ShardSpan
from quire.layers.slot import length
from quire.layers.step import StepContext


class BidirectionalAttention(Module):
    """Attention of one encoder layer; with `window` w a token attends to those less than w away.

    Other arguments are those of `quire.layers.attention.Attention`, except that ALiBi lowers scores on both sides.
    `relative_bias`, owned and set by the model, is added to scores.
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
        window: int | None = None,
        rotary: RotaryEmbedding | None = None,
        qk_norm: tuple[RMSNorm, RMSNorm] | None = None,
        alibi: float | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.rotary = rotary
        self.qk_norm = qk_norm
        self.relative_bias: RelativeBias | None = None
        self.longest = config.model.max_model_len or config.arch.max_position_embeddings
        rows = ops.bidirectional_attention.supporting(device_type(config), activation_dtype(config))
        self.backend_name = rows[0].name if rows else "reference"
        self.register_buffer(
            "alibi_slopes", None if alibi is None else alibi * slopes(num_heads), persistent=False
        )
        self.group_id = 0

    def apply_shard(self, shard: Shard) -> None:
        heads = ShardSpan(self.num_heads).piece(shard, self.name)
        self.num_heads = length(heads)
        self.num_kv_heads = length(ShardSpan(self.num_kv_heads, replicated=True).piece(shard, self.name))
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes[heads]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]; a rotary embedding rotates q and k in place."""
        if self.qk_norm is not None:
            q_norm, k_norm = self.qk_norm
            q, k = q_norm(q), k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(positions, q, k, step)
        out = ops.bidirectional_attention(
            q,
            k,
            v,
            step.metadata(self.group_id, GroupMetadata),
            self.scale,
            window=self.window,
            alibi_slopes=self.alibi_slopes,
            relative_bias=None if self.relative_bias is None else self.relative_bias.table,
        )
        return out.flatten(1)

    def bind(self, group_id: int, spec: KVCacheSpec, tensor: Tensor) -> None:
        """See `CacheUser`; an encoder stores nothing in the tensor."""
        assert isinstance(spec, EncoderOnlySpec), f"an encoder has no cache of kind {type(spec).__name__}"
        self.group_id = group_id

    def why_not_captured(self) -> str | None:
        """See `CacheUser`."""
        return None

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `CacheUser`."""
        return EncoderOnlySpec(self.longest)
