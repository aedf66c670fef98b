# SPDX-License-Identifier: Apache-2.0
"""Linear attention with the delta rule: Gated DeltaNet (S. Yang et al., 2024, arXiv:2412.06464) and Kimi Delta
Attention (Kimi team, 2025, arXiv:2510.26692), whose state decays per channel.

Shapes: T tokens of the step, H hidden size, Hk/Hv key and value heads, Dk/Dv their sizes; of Kimi's, h heads of size D
for keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.attention_metadata import StateMetadata
from quire.layers.base import Module, RowSource, activation_dtype, model_dtype
from quire.layers.linear import Linear
from quire.layers.mamba import CausalConv, negative_exp
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import WHOLE, Shard, ShardSpan
from quire.layers.slot import length
from quire.layers.states import StateCache
from quire.layers.step import StepContext
from quire.layers.vectors import LayerVector, VectorLayer


class DeltaRule(VectorLayer):
    """Gated delta rule; the checkpoint stores its decays beside this layer, as `A_log` and `dt_bias`.

    `steps` are the time steps of a head; `strongest` and `least` as in `ops.gated_delta`; `around` as in `LayerVector`,
    for `A_log`.
    """

    rates: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        *,
        heads: int,
        name: str,
        steps: int = 1,
        strongest: float = 1.0,
        least: float | None = None,
        around: tuple[int, int] = (0, 0),
    ) -> None:
        self.vectors = (
            LayerVector("rates", "A_log", convert=negative_exp, around=around),
            LayerVector("dt_bias", "dt_bias", unit=steps),
        )
        super().__init__(ShardSpan(heads), beside=True, name=name)
        self.strongest, self.least = strongest, least

    def forward(self, qkv: Tensor, ba: Tensor, states: Tensor, metadata: StateMetadata) -> Tensor:
        """qkv [T, 2 Hk Dk + Hv Dv], ba [T, Hv + Hv * steps] -> [T, Hv, Dv]; see `ops.gated_delta`."""
        return ops.gated_delta(
            qkv, ba, self.rates, self.dt_bias, states, metadata, strongest=self.strongest, least=self.least
        )


class GatedDeltaNet(Module):
    """Projections, a convolution over queries, keys and values, the delta rule, and a gated norm per head."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, dtype, own = config.arch, model_dtype(config), config.arch.delta
        assert own is not None, "a layer of this kind is described"
        keys, values = ShardSpan(own.key_heads, own.key_dim), ShardSpan(own.value_heads, own.value_dim)
        groups = own.key_heads if own.grouped else 1
        qkvz, of_heads = (keys, keys, values, values), ShardSpan(own.value_heads)
        self.in_proj_qkvz = self._in_proj(config, groups, qkvz, f"{prefix}.in_proj_qkvz")
        if own.steps_grouped is not None:
            groups = own.key_heads if own.steps_grouped else 1
        self.in_proj_ba = self._in_proj(config, groups, (of_heads, of_heads), f"{prefix}.in_proj_ba")
        self.conv1d = CausalConv(
            spans=(keys, keys, values), taps=own.taps, bias=False, silu=True, name=f"{prefix}.conv1d"
        )
        self.rule = DeltaRule(heads=own.value_heads, strongest=own.strongest, name=f"{prefix}.rule")
        self.norm = RMSNorm(
            size=own.value_dim,
            eps=arch.norm_eps if own.norm_eps is None else own.norm_eps,
            dtype=activation_dtype(config),
            name=f"{prefix}.norm",
        )
        self.out_proj = Linear(
            in_features=values.size,
            out_features=arch.hidden_size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.out_proj",
            partition="input",
        )
        self.prefix = prefix
        self.turns = own.value_heads // own.key_heads if own.in_turn else 1
        parts = [(own.taps - 1, (keys, keys, values)), ((of_heads,), own.key_dim, own.value_dim)]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)
        self.apply_shard(WHOLE)

    def apply_shard(self, shard: Shard) -> None:
        if shard.of > 1 and self.turns > 1:
            raise ConfigError(
                f"--tensor-parallel-size is {shard.of}, but {self.prefix} has its value heads in the order of GGUF, in "
                "which key heads serve them in turn; only layers with as many key as value heads support several ranks"
            )
        q, k, v, z = map(length, self.in_proj_qkvz.rows)
        self.widths, self.parts = (q + k + v, z), (q, k, v)

    @staticmethod
    def _in_proj(config: EngineConfig, groups: int, spans: tuple[ShardSpan, ...], name: str) -> Linear:
        return Linear(
            in_features=config.arch.hidden_size,
            out_features=sum(span.size for span in spans),
            bias=False,
            dtype=model_dtype(config),
            name=name,
            partition="output",
            spans=spans,
            groups=groups,
        )

    def reads(self, source: RowSource) -> None:
        """Ignore the declaration: x has two readers here, so it cannot arrive quantized."""

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        metadata, (conv_states, states) = self.cache.metadata(step), self.cache.views
        qkv, z = self.in_proj_qkvz(x, step).split(self.widths, 1)
        qkv = self._in_turn(self.conv1d(qkv, conv_states, metadata))
        out = self.norm(self.rule(qkv, self.in_proj_ba(x, step), states, metadata))
        return self.out_proj(out.flatten(1) * ops.activate(z, "silu"), step)

    def _in_turn(self, qkv: Tensor) -> Tensor:
        """Repeat key heads to one per value head, if they are not shared by adjacent ones: [T, 2 Hv Dk + Hv Dv]."""
        if self.turns == 1:
            return qkv
        q, k, v = qkv.split(self.parts, 1)
        return torch.cat((q,) * self.turns + (k,) * self.turns + (v,), 1)


class KimiDeltaAttention(Module):
    """Gated DeltaNet with equal head sizes; time steps and gates are computed directly or by low-rank projections of D.

    `in_proj` computes queries, keys, values and strengths, and the low-rank intermediates, which are replicated.
    """

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, own = config.arch, config.arch.delta
        assert own is not None, "a layer of this kind is described"
        assert (own.key_heads, own.key_dim) == (own.value_heads, own.value_dim), "heads are alike"
        heads = ShardSpan(own.value_heads, own.value_dim)
        made = ShardSpan(1, own.value_dim, replicated=True) if own.narrow else heads
        parts = (heads, heads, heads, ShardSpan(heads.units), made, made)
        self.in_proj = Linear(
            in_features=arch.hidden_size,
            out_features=sum(part.size for part in parts),
            bias=False,
            dtype=model_dtype(config),
            name=f"{prefix}.in_proj",
            partition="output",
            spans=parts,
        )
        self.f_b_proj = self.g_b_proj = None
        if own.narrow:
            self.f_b_proj = self._wide(config, heads, f"{prefix}.f_b_proj")
            self.g_b_proj = self._wide(config, heads, f"{prefix}.g_b_proj")
        self.conv1d = CausalConv(
            spans=(heads, heads, heads), taps=own.taps, bias=False, silu=True, name=f"{prefix}.conv1d"
        )
        self.rule = DeltaRule(
            heads=heads.units,
            steps=own.key_dim,
            least=own.least,
            around=(2, 1) if own.narrow else (0, 0),
            name=f"{prefix}.rule",
        )
        self.o_norm = RMSNorm(
            size=own.value_dim, eps=arch.norm_eps, dtype=activation_dtype(config), name=f"{prefix}.o_norm"
        )
        self.o_proj = Linear(
            in_features=heads.size,
            out_features=arch.hidden_size,
            bias=False,
            dtype=model_dtype(config),
            name=f"{prefix}.o_proj",
            partition="input",
        )
        shapes = [
            (own.taps - 1, (heads, heads, heads)),
            ((ShardSpan(heads.units),), own.key_dim, own.value_dim),
        ]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=shapes)
        self.apply_shard(WHOLE)

    def apply_shard(self, shard: Shard) -> None:
        q, k, v, *others = map(length, self.in_proj.rows)
        self.widths = (q + k + v, *others)

    @staticmethod
    def _wide(config: EngineConfig, heads: ShardSpan, name: str) -> Linear:
        return Linear(
            in_features=heads.unit,
            out_features=heads.size,
            bias=False,
            dtype=model_dtype(config),
            name=name,
            partition="output",
            spans=(heads,),
        )

    def reads(self, source: RowSource) -> None:
        """See `SelfAttention.reads`."""
        self.in_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        metadata, (conv_states, states) = self.cache.metadata(step), self.cache.views
        qkv, strengths, times, gates = self.in_proj(x, step).split(self.widths, 1)
        qkv = self.conv1d(qkv, conv_states, metadata)
        if self.f_b_proj is not None and self.g_b_proj is not None:
            times, gates = self.f_b_proj(times, step), self.g_b_proj(gates, step)
        out = self.o_norm(self.rule(qkv, torch.cat((strengths, times), 1), states, metadata))
        return self.o_proj(out.flatten(1) * ops.activate(gates, "sigmoid"), step)
