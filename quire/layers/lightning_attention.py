# SPDX-License-Identifier: Apache-2.0
"""Lightning attention (Qin et al., 2024, arXiv:2401.04658), as in MiniMax-01 (2025, arXiv:2501.08313) and, with heads
normed and rotated, in Ring-linear (Ling team, 2025, arXiv:2510.19338).

Linear attention whose state decays uniformly, at each head's own rate. It is Mamba 2's recurrence with time steps of 1
and a group for each head, with b = key and c = query.

Shapes: T tokens of the step, H hidden size, h heads of size D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.layers.attention_parts import slopes
from quire.layers.base import Module, RowSource, activation_dtype, model_dtype
from quire.layers.head_norms import SharedRMSNorm
from quire.layers.linear import Linear, QKVLinear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import Shard, ShardSpan
from quire.layers.states import StateCache
from quire.layers.step import StepContext

_NORM_EPS = 1e-6


class LightningScan(Module):
    """Linear attention state of each head, decaying at `rates` [h] < 0; `name` is the layer's."""

    rates: Tensor
    zeros: Tensor

    def __init__(
        self, *, config: EngineConfig, heads: ShardSpan, rates: Tensor, scale: float = 1.0, name: str
    ) -> None:
        super().__init__()
        self.units, self.scale, self.name = ShardSpan(heads.units), scale, name
        # Scaling values has the effect of time steps of another length.
        self.register_buffer("rates", rates / scale, persistent=False)
        self.register_buffer("zeros", torch.zeros_like(rates), persistent=False)
        parts = [((self.units,), heads.unit, heads.unit)]
        self.cache = StateCache(config=config, name=f"{name}.cache", parts=parts)

    def apply_shard(self, shard: Shard) -> None:
        own = self.units.piece(shard, self.name)
        self.rates, self.zeros = self.rates[own], self.zeros[own]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: StepContext) -> Tensor:
        """q, k and v [T, h * D] of a rank's heads -> [T, h * D]."""
        metadata, (states,) = self.cache.metadata(step), self.cache.views
        heads = len(self.rates)
        return ops.ssd_scan(
            v,
            torch.zeros_like(v[:, :heads]),
            self.rates,
            k,
            q,
            self.zeros,
            self.zeros,
            None,
            states,
            metadata,
            groups=heads,
            time_limits=(self.scale, self.scale),
        )


class LightningAttention(Module):
    """`out(norm(attention(silu(qkv(x)))) * sigmoid(gate(x)))`; the deeper the layer, the slower the decay."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, dtype, heads = (
            config.arch,
            model_dtype(config),
            ShardSpan(config.arch.num_heads, config.arch.head_dim),
        )
        self.lightning_qkv = QKVLinear(
            hidden_size=arch.hidden_size,
            num_heads=heads.units,
            num_kv_heads=heads.units,
            head_dim=heads.unit,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.lightning_qkv",
            grouped=True,
            merged=True,
        )
        self.output_gate = Linear(
            in_features=arch.hidden_size,
            out_features=heads.size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.output_gate",
            partition="output",
            spans=(heads,),
            activation="sigmoid",
        )
        self.norm = SharedRMSNorm(heads, eps=_NORM_EPS, dtype=activation_dtype(config), name=f"{prefix}.norm")
        self.out_proj = Linear(
            in_features=heads.size,
            out_features=arch.hidden_size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.out_proj",
            partition="input",
        )
        share = 1.0 - layer / (arch.num_layers - 1 + 1e-5) + 1e-5
        self.scan = LightningScan(config=config, heads=heads, rates=-share * slopes(heads.units), name=prefix)

    def reads(self, source: RowSource) -> None:
        """Ignore the declaration: x has two readers here, so it cannot arrive quantized."""

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        q, k, v = ops.activate(self.lightning_qkv(x, step), "silu").chunk(3, dim=1)
        return self.out_proj(self.norm(self.scan(q, k, v, step)) * self.output_gate(x, step), step)


class RotatedLightningAttention(Module):
    """`out(norm(attention(qkv(x))) * sigmoid(gate(x)))`; the deeper the layer, the slower the decay."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, own, dtype = config.arch, config.arch.rotated_lightning, model_dtype(config)
        assert own is not None, "a layer of this kind is described"
        heads = ShardSpan(arch.num_heads, own.head_dim)
        self.qkv_proj = QKVLinear(
            hidden_size=arch.hidden_size,
            num_heads=heads.units,
            num_kv_heads=heads.units,
            head_dim=heads.unit,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.qkv_proj",
        )
        self.q_norm = self.k_norm = None
        if own.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(
                    size=own.head_dim,
                    eps=arch.norm_eps,
                    dtype=activation_dtype(config),
                    name=f"{prefix}.{name}",
                )
                for name in ("q_norm", "k_norm")
            )
        self.rotary = rotary
        self.g_proj = Linear(
            in_features=arch.hidden_size,
            out_features=heads.size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.g_proj",
            partition="output",
            spans=(heads,),
            activation="sigmoid",
        )
        self.g_norm = SharedRMSNorm(
            heads,
            groups=own.groups,
            eps=arch.norm_eps,
            dtype=activation_dtype(config),
            name=f"{prefix}.g_norm",
        )
        self.o_proj = Linear(
            in_features=heads.size,
            out_features=arch.hidden_size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.o_proj",
            partition="input",
        )
        # The first layer's factor is above 1, as in the published code of these models.
        share = 1.0 - (layer - 1) / max(arch.num_layers - 1, 1) + 1e-5
        rates = -share * slopes(heads.units)
        self.scan = LightningScan(
            config=config, heads=heads, rates=rates, scale=heads.unit**-0.5, name=prefix
        )

    def reads(self, source: RowSource) -> None:
        """Ignore the declaration: x has two readers here, so it cannot arrive quantized."""

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        q, k, v = self.qkv_proj.heads(x, step)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(positions, q, k, step)
        out = self.g_norm(self.scan(q.flatten(1), k.flatten(1), v.flatten(1), step))
        return self.o_proj(out * self.g_proj(x, step), step)
