"""Kimi Delta Attention (Kimi team, 2025, arXiv:2510.26692): a gated delta rule whose memory decays by channels.

Shapes: T tokens of the step, H hidden size, h heads of size D, of keys as of values.
"""

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.layers.base import Module, RowSource, activation_dtype, model_dtype
from quire.layers.causal_conv import CausalConv
from quire.layers.gated_delta_net import DeltaRule
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import WHOLE, Shard, Span
from quire.layers.slot import length
from quire.layers.states import StateCache
from quire.layers.step import StepContext


class KimiDeltaAttention(Module):
    """Gated DeltaNet with heads of one size, whose time steps and gates are made by way of D numbers each, or at once.

    `in_proj` makes queries, keys, values and strengths, and those numbers, of which every rank has all.
    """

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, own = config.arch, config.arch.delta
        assert own is not None, "a layer of this kind is described"
        assert (own.key_heads, own.key_dim) == (own.value_heads, own.value_dim), "heads are alike"
        heads = Span(own.value_heads, own.value_dim)
        made = Span(1, own.value_dim, replicated=True) if own.narrow else heads
        parts = (heads, heads, heads, Span(heads.units), made, made)
        self.in_proj = Linear(
            in_features=arch.hidden_size,
            out_features=sum(part.size for part in parts),
            bias=False,
            dtype=model_dtype(config),
            name=f"{prefix}.in_proj",
            cut="output",
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
            cut="input",
        )
        shapes = [(own.taps - 1, (heads, heads, heads)), ((Span(heads.units),), own.key_dim, own.value_dim)]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=shapes)
        self.take_share(WHOLE)

    def take_share(self, shard: Shard) -> None:
        q, k, v, *others = map(length, self.in_proj.rows)
        self.widths = (q + k + v, *others)

    @staticmethod
    def _wide(config: EngineConfig, heads: Span, name: str) -> Linear:
        return Linear(
            in_features=heads.unit,
            out_features=heads.size,
            bias=False,
            dtype=model_dtype(config),
            name=name,
            cut="output",
            spans=(heads,),
        )

    def reads(self, source: RowSource) -> None:
        """As `SelfAttention.reads`."""
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
