"""Mamba 2's mixer (Dao and Gu, 2024, arXiv:2405.21060): Mamba's, cut into heads, each of which decays as one.

Shapes: T tokens of the step, H hidden size, h heads of size D, N states of each, G groups of heads that share b and c.
"""

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.kernels.attention_metadata import StateMetadata
from quire.layers.base import Module, RowSource, activation_dtype, model_dtype
from quire.layers.causal_conv import CausalConv
from quire.layers.linear import Linear
from quire.layers.mamba import negative_exp
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import WHOLE, Shard, Span
from quire.layers.shared_norm import SharedRMSNorm
from quire.layers.slot import length
from quire.layers.states import StateCache
from quire.layers.step import StepContext
from quire.layers.vectors import Vector, VectorLayer


class HeadScan(VectorLayer):
    """The recurrence of each head, as `ops.ssd_scan` says; of its decays the checkpoint has `A_log`, [h]."""

    vectors = (
        Vector("a", "A_log", convert=negative_exp),
        Vector("skip", "D", "ones"),
        Vector("dt_bias", "dt_bias"),
    )
    a: Tensor
    skip: Tensor
    dt_bias: Tensor

    def __init__(self, *, heads: int, groups: int, time_limits: tuple[float, float], name: str) -> None:
        super().__init__(Span(heads), name=name)
        self.of_all, self.groups = Span(groups, replicated=True), groups
        self.time_limits = time_limits

    def take_share(self, shard: Shard) -> None:
        self.groups = length(self.of_all.piece(shard, self.name))

    def forward(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        gate: Tensor | None,
        states: Tensor,
        metadata: StateMetadata,
    ) -> Tensor:
        """x [T, h * D], and gate if any, dt [T, h], b and c [T, G * N], states [blocks, h, N, D] -> [T, h * D]."""
        return ops.ssd_scan(
            x,
            dt,
            self.a,
            b,
            c,
            self.skip,
            self.dt_bias,
            gate,
            states,
            metadata,
            groups=self.groups,
            time_limits=self.time_limits,
        )


class Mamba2Mixer(Module):
    """`out(norm(scan(conv(x, b, c)) * silu(z)))`, where `in_proj` makes z, x, b, c and time steps.

    Some models have no norm, some gate behind it, and some scale each of what `in_proj` makes.
    """

    multipliers: Tensor | None

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        own, hidden, dtype = config.arch.mamba2, config.arch.hidden_size, model_dtype(config)
        assert own is not None, "a layer of this kind is described"
        channels, heads = Span(own.heads, own.head_dim), Span(own.heads)
        shared = Span(own.groups, own.states, replicated=True)
        spans = (channels, channels, shared, shared, heads)
        self.in_proj = Linear(
            in_features=hidden,
            out_features=sum(span.size for span in spans),
            bias=own.bias,
            dtype=dtype,
            name=f"{prefix}.in_proj",
            cut="output",
            spans=spans,
        )
        self.of_each, self.dtype = own.multipliers, activation_dtype(config)
        self.register_buffer("multipliers", None, persistent=False)
        self.conv1d = CausalConv(
            spans=(channels, shared, shared),
            taps=own.taps,
            bias=own.conv_bias,
            silu=True,
            name=f"{prefix}.conv1d",
        )
        self.scan = HeadScan(
            heads=own.heads, groups=own.groups, time_limits=own.time_limits, name=f"{prefix}.scan"
        )
        self.gated_norm = None
        if own.norm_eps is not None:
            self.gated_norm = SharedRMSNorm(
                channels,
                groups=own.groups,
                eps=own.norm_eps,
                dtype=activation_dtype(config),
                name=f"{prefix}.gated_norm",
            )
        self.gate_after_norm = own.gate_after_norm
        self.out_proj = Linear(
            in_features=channels.size,
            out_features=hidden,
            bias=own.bias if own.out_bias is None else own.out_bias,
            dtype=dtype,
            name=f"{prefix}.out_proj",
            cut="input",
        )
        parts = [(own.taps - 1, (channels, shared, shared)), ((heads,), own.states, own.head_dim)]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)
        self.take_share(WHOLE)

    def take_share(self, shard: Shard) -> None:
        gate, x, b, c, dt = sizes = [*map(length, self.in_proj.rows)]
        self.widths, self.conv_widths = [gate, x + b + c, dt], [x, b, c]
        if self.of_each:
            row = [m for m, size in zip(self.of_each, sizes, strict=True) for _ in range(size)]
            self.multipliers = torch.tensor(row, dtype=self.dtype, device="cpu")

    def reads(self, source: RowSource) -> None:
        """As `SelfAttention.reads`."""
        self.in_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        metadata, (conv_states, states) = self.cache.metadata(step), self.cache.views
        rows = self.in_proj(x, step)
        if self.multipliers is not None:
            rows = rows * self.multipliers
        gate, x, dt = rows.split(self.widths, 1)
        x, b, c = self.conv1d(x, conv_states, metadata).split(self.conv_widths, 1)
        out = self.scan(x, dt, b, c, None if self.gate_after_norm else gate, states, metadata)
        if self.gated_norm is not None:
            out = self.gated_norm(out)
        if self.gate_after_norm:
            out = out * ops.activate(gate, "silu")
        return self.out_proj(out, step)
