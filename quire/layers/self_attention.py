# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention of decoder layers: projections, head norms, positions, attention, output projection.

Shapes: T tokens of the step, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.layers.attention import Attention
from quire.layers.attention_parts import Sinks, TemperatureTuning
from quire.layers.base import Module, RowSource, model_dtype
from quire.layers.bidirectional_attention import BidirectionalAttention
from quire.layers.head_norms import AFTER_ROPE, NORMED_IN_KERNEL, QK_NORMS, head_norm
from quire.layers.linear import Linear, QKVLinear
from quire.layers.rotary import RotaryEmbedding
from quire.layers.step import StepContext


class SelfAttention(Module):
    """Grouped-query attention of one layer; `rotary` is None if the model has other positions or none."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        kind = arch.layer_types[layer]
        is_full = kind == "full_attention"
        self.keys_as_values = arch.keys_as_values and is_full
        assert arch.v_norm or not self.keys_as_values, "keys are rotated in place"
        self.qkv_proj = QKVLinear(
            hidden_size=arch.attention_in_size or arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            bias=arch.attention_bias,
            dtype=dtype,
            name=f"{prefix}.qkv_proj",
            transposed=arch.transposed_weights,
            grouped=arch.qkv_grouped,
            gated=arch.attention_gate,
            clip=arch.qkv_clip,
            blocks=arch.qkv_blocks,
            values=not self.keys_as_values,
        )
        self.o_proj = Linear(
            in_features=arch.num_heads * arch.head_dim,
            out_features=arch.hidden_size,
            bias=arch.attention_out_bias,
            dtype=dtype,
            name=f"{prefix}.o_proj",
            partition="input",
            transposed=arch.transposed_weights,
        )
        qk_norm = None if layer in arch.unnormed_layers else arch.qk_norm
        if qk_norm is not None:
            self.q_norm = QK_NORMS[qk_norm](config, arch.num_heads, f"{prefix}.q_norm")
            self.k_norm = QK_NORMS[qk_norm](config, arch.num_kv_heads, f"{prefix}.k_norm")
        self.v_norm = head_norm(config, f"{prefix}.v_norm") if arch.v_norm else None
        # The kernel that rotates and stores keys can fuse one kind of norm.
        in_kernel = qk_norm in NORMED_IN_KERNEL and rotary is not None
        self.norms_first = qk_norm is not None and not in_kernel
        self.temperature = None
        if arch.temperature is not None and (rotary is None or arch.temperature.rotated_too):
            self.temperature = TemperatureTuning(config=config, temperature=arch.temperature)
        self.sinks = Sinks(num_heads=arch.num_heads, name=f"{prefix}.sinks") if arch.attention_sinks else None
        self.rotary_first = rotary if qk_norm in AFTER_ROPE else None
        shape: dict[str, Any] = {
            "config": config,
            "name": f"{prefix}.attn",
            "num_heads": arch.num_heads,
            "num_kv_heads": arch.num_kv_heads,
            "head_dim": arch.head_dim,
            "scale": arch.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale,
            "rotary": None if self.rotary_first is not None else rotary,
            "qk_norm": (self.q_norm, self.k_norm) if in_kernel else None,
            "alibi": arch.alibi,
        }
        window = arch.sliding_window if kind == "sliding_attention" else None
        self.attn: Attention | BidirectionalAttention
        if arch.bidirectional:
            self.attn = BidirectionalAttention(**shape, window=window)
        else:
            self.attn = Attention(
                **shape,
                sliding_window=window,
                attention_chunk=arch.attention_chunk if kind == "chunked_attention" else None,
                soft_cap=arch.attn_logit_softcap,
                sinks=self.sinks,
                looks_ahead=not (arch.full_layers_causal and is_full),
            )

    def reads(self, source: RowSource) -> None:
        """Declare that x is the output of `source` and that no other layer reads it; see `Linear.reads`."""
        self.qkv_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        q, k, *others = self.qkv_proj.heads(x, step)
        v, *gate = (k, *others) if self.keys_as_values else others
        if self.rotary_first is not None:
            q, k = self.rotary_first(positions, q, k, step)
        if self.norms_first:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.v_norm is not None:
            v = self.v_norm(v)
        if self.temperature is not None:
            q = self.temperature(positions, q)
        out = self.attn(q, k, v, positions, step)
        if gate:
            out = out * ops.activate(gate[0].flatten(1), "sigmoid")
        return self.o_proj(out, step)
