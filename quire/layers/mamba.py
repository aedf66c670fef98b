# SPDX-License-Identifier: Apache-2.0
"""State-space mixers: Mamba (Gu and Dao, 2023, arXiv:2312.00752), Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060), PLaMo
2's (Preferred Networks, 2025), LFM2's short convolution (Liquid AI, 2025, arXiv:2511.23404) and Griffin's recurrent
block (S. De et al., 2024, arXiv:2402.19427).

Shapes: T tokens of the step, H hidden size, C channels, K taps, N states per channel or head, R inputs of time steps,
h heads of size D, G groups of heads that share b and c, W = h * D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from quire.config import EngineConfig
from quire.kernels import ops
from quire.kernels.attention_metadata import StateMetadata
from quire.layers.activation import PLAIN
from quire.layers.base import Layer, Module, RowSource, activation_dtype, model_dtype, parameter
from quire.layers.head_norms import HeadRMSNorm, SharedRMSNorm
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.quantization import QuantMethod
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import WHOLE, Shard, ShardSpan
from quire.layers.slot import Slot, TensorPart, length
from quire.layers.states import StateCache
from quire.layers.step import StepContext
from quire.layers.vectors import LayerVector, VectorLayer


class CausalConv(Layer):
    """Depthwise causal convolution, `conv1d` [C, 1, K] in the checkpoint, kept as [K, C]; its last inputs are a state.

    `spans` are separately sharded channels; the checkpoint may have a convolution for each.
    """

    def __init__(
        self, *, spans: Sequence[ShardSpan], taps: int, bias: bool, silu: bool = False, name: str
    ) -> None:
        super().__init__(name)
        self.spans = tuple(spans)
        self.taps = taps
        self.has_bias = bias
        self.silu = silu
        self.create_weights(None)

    def create_weights(self, method: QuantMethod | None, shard: Shard = WHOLE) -> None:
        self.shard = shard
        self.rows = tuple(span.piece(shard, self.name) for span in self.spans)
        channels = sum(rows.stop - rows.start for rows in self.rows)
        self.weight = parameter(self.taps, channels, dtype=torch.float32)
        self.bias = parameter(channels, dtype=torch.float32) if self.has_bias else None

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        sources, place = list(names) * (len(self.spans) // len(names)), 0
        firsts = dict.fromkeys(names, 0)
        for name, span, rows in zip(sources, self.spans, self.rows, strict=True):
            total = sum(each.size for at, each in zip(sources, self.spans, strict=True) if at == name)
            first = firsts[name]
            region, end = slice(first, first + span.size), place + rows.stop - rows.start
            taken = slice(first + rows.start, first + rows.stop)
            weight = self.weight[:, place:end].t().unsqueeze(1)
            sides = (slice(0, 1), slice(0, self.taps))
            yield (
                f"{name}.weight",
                Slot(weight, "normal", TensorPart((total, 1, self.taps), (region, *sides), (taken, *sides))),
            )
            if self.bias is not None:
                yield (
                    f"{name}.bias",
                    Slot(self.bias[place:end], "zeros", TensorPart((total,), (region,), (taken,))),
                )
            firsts[name], place = first + span.size, end

    def forward(self, x: Tensor, states: Tensor, metadata: StateMetadata) -> Tensor:
        """x [T, C], states [blocks, K - 1, C] -> [T, C]."""
        return ops.causal_conv(x, self.weight, self.bias, states, metadata, self.silu)


class ShortConv(Module):
    """LFM2's short convolution between two gates: `out(c * conv(b * x))`; `in_proj` computes b, c and x."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, own = config.arch, config.arch.short_conv
        assert own is not None, "a layer of this kind is described"
        size, channels = arch.hidden_size, ShardSpan(arch.hidden_size)
        self.in_proj = Linear(
            in_features=size,
            out_features=3 * size,
            bias=own.bias,
            dtype=model_dtype(config),
            name=f"{prefix}.in_proj",
            partition="output",
            spans=(channels,) * 3,
        )
        self.conv = CausalConv(spans=(channels,), taps=own.taps, bias=own.bias, name=f"{prefix}.conv")
        self.out_proj = Linear(
            in_features=size,
            out_features=size,
            bias=own.bias,
            dtype=model_dtype(config),
            name=f"{prefix}.out_proj",
            partition="input",
        )
        parts = [(own.taps - 1, (channels,))]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)

    def reads(self, source: RowSource) -> None:
        """See `SelfAttention.reads`."""
        self.in_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        b, c, x = self.in_proj(x, step).chunk(3, 1)
        mixed = self.conv(b * x, *self.cache.views, self.cache.metadata(step))
        return self.out_proj(c * mixed, step)


class SelectiveScan(VectorLayer):
    """Selective scan per channel, as in `ops.selective_scan`; the checkpoint stores decays as `A_log` [C, N]."""

    vectors = (LayerVector("skip", "D", "ones"),)
    skip: Tensor

    def __init__(self, *, channels: int, states: int, name: str) -> None:
        self.states = states
        super().__init__(ShardSpan(channels), name=name)

    def create_weights(self, method: QuantMethod | None, shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self.a = parameter(self.states, length(self.own), dtype=torch.float32)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield from super().slots(names)
        every, states = slice(0, self.span.size), slice(0, self.states)
        matrix = TensorPart((every.stop, states.stop), (every, states), (self.own, states))
        yield f"{names[0]}.A_log", Slot(self.a.t(), "zeros", matrix, convert=negative_exp)

    def forward(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        gate: Tensor,
        states: Tensor,
        metadata: StateMetadata,
    ) -> Tensor:
        """x, dt and gate [T, C], b and c [T, N], states [blocks, N, C] -> [T, C]."""
        return ops.selective_scan(x, dt, self.a, b, c, self.skip, gate, states, metadata)


class UnitRMSNorm(Module):
    """RMSNorm without weight: `x / rms(x)`."""

    ones: Tensor

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(size, dtype=dtype, device="cpu"), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.ones, self.eps)


class MambaMixer(Module):
    """Mamba: `out(scan(conv(x)) * silu(z))`; `in_proj` computes x and z, and `x_proj` the scan's dt, b and c."""

    dt_layernorm: RMSNorm | UnitRMSNorm
    b_layernorm: RMSNorm | UnitRMSNorm
    c_layernorm: RMSNorm | UnitRMSNorm

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        own, hidden, dtype = config.arch.mamba, config.arch.hidden_size, model_dtype(config)
        assert own is not None, "a layer of this kind is described"
        channels = ShardSpan(own.channels)
        self.in_proj = Linear(
            in_features=hidden,
            out_features=2 * own.channels,
            bias=own.bias,
            dtype=dtype,
            name=f"{prefix}.in_proj",
            partition="output",
            spans=(channels, channels),
        )
        self.conv1d = CausalConv(
            spans=(channels,), taps=own.taps, bias=own.conv_bias, silu=True, name=f"{prefix}.conv1d"
        )
        self.widths = [own.rank, own.states, own.states]
        self.x_proj = Linear(
            in_features=own.channels,
            out_features=sum(self.widths),
            bias=False,
            dtype=dtype,
            name=f"{prefix}.x_proj",
            partition="input",
        )
        self.norm_eps = own.norm_eps
        for name, size in zip(_NORMS, self.widths, strict=True) if own.norm_eps is not None else ():
            setattr(self, name, _norm(config, size, f"{prefix}.{name}"))
        self.dt_proj = Linear(
            in_features=own.rank,
            out_features=own.channels,
            bias=True,
            dtype=dtype,
            name=f"{prefix}.dt_proj",
            partition="output",
        )
        self.scan = SelectiveScan(channels=own.channels, states=own.states, name=f"{prefix}.scan")
        self.out_proj = Linear(
            in_features=own.channels,
            out_features=hidden,
            bias=own.bias,
            dtype=dtype,
            name=f"{prefix}.out_proj",
            partition="input",
        )
        parts = [(own.taps - 1, (channels,)), (own.states, (channels,))]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)

    def reads(self, source: RowSource) -> None:
        """See `SelfAttention.reads`."""
        self.in_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        metadata, (conv_states, states) = self.cache.metadata(step), self.cache.views
        x, gate = self.in_proj(x, step).chunk(2, 1)
        x = self.conv1d(x, conv_states, metadata)
        dt, b, c = self.x_proj(x, step).split(self.widths, 1)
        if self.norm_eps is not None:
            dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        return self.out_proj(self.scan(x, self.dt_proj(dt, step), b, c, gate, states, metadata), step)


_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def _norm(config: EngineConfig, size: int, name: str) -> RMSNorm | UnitRMSNorm:
    """Return a norm of an output of `x_proj`."""
    own, dtype = config.arch.mamba, activation_dtype(config)
    assert own is not None
    assert own.norm_eps is not None
    if own.norm_weight:
        return RMSNorm(size=size, eps=own.norm_eps, dtype=dtype, name=name)
    return UnitRMSNorm(size, own.norm_eps, dtype)


def negative_exp(stored: Tensor) -> Tensor:
    """Return the decay -exp(A_log)."""
    return -stored.float().exp()


class HeadScan(VectorLayer):
    """SSD scan per head, as in `ops.ssd_scan`; the checkpoint stores decays as `A_log` [h]."""

    vectors = (
        LayerVector("a", "A_log", convert=negative_exp),
        LayerVector("skip", "D", "ones"),
        LayerVector("dt_bias", "dt_bias"),
    )
    a: Tensor
    skip: Tensor
    dt_bias: Tensor

    def __init__(self, *, heads: int, groups: int, time_limits: tuple[float, float], name: str) -> None:
        super().__init__(ShardSpan(heads), name=name)
        self.of_all, self.groups = ShardSpan(groups, replicated=True), groups
        self.time_limits = time_limits

    def apply_shard(self, shard: Shard) -> None:
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
    """Mamba 2: `out(norm(scan(conv(x, b, c)) * silu(z)))`; `in_proj` computes z, x, b, c and time steps.

    Some models have no norm, some gate after it, and some scale each output of `in_proj`.
    """

    multipliers: Tensor | None

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        own, hidden, dtype = config.arch.mamba2, config.arch.hidden_size, model_dtype(config)
        assert own is not None, "a layer of this kind is described"
        channels, heads = ShardSpan(own.heads, own.head_dim), ShardSpan(own.heads)
        shared = ShardSpan(own.groups, own.states, replicated=True)
        spans = (channels, channels, shared, shared, heads)
        self.in_proj = Linear(
            in_features=hidden,
            out_features=sum(span.size for span in spans),
            bias=own.bias,
            dtype=dtype,
            name=f"{prefix}.in_proj",
            partition="output",
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
            partition="input",
        )
        parts = [(own.taps - 1, (channels, shared, shared)), ((heads,), own.states, own.head_dim)]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)
        self.apply_shard(WHOLE)

    def apply_shard(self, shard: Shard) -> None:
        gate, x, b, c, dt = sizes = [*map(length, self.in_proj.rows)]
        self.widths, self.conv_widths = [gate, x + b + c, dt], [x, b, c]
        if self.of_each:
            row = [m for m, size in zip(self.of_each, sizes, strict=True) for _ in range(size)]
            self.multipliers = torch.tensor(row, dtype=self.dtype, device="cpu")

    def reads(self, source: RowSource) -> None:
        """See `SelfAttention.reads`."""
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


class PLaMo2Mamba(Module):
    """PLaMo 2's Mamba: `out(scan(conv(x)) * silu(z))`; `in_proj` computes each head's z and x, and `x_proj` dt, b and
    c.

    All heads share b and c, which are normed, as is the input of their time steps.
    """

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        own, hidden, dtype = config.arch.plamo2_mamba, config.arch.hidden_size, model_dtype(config)
        assert own is not None, "a layer of this kind is described"
        heads, channels = ShardSpan(own.heads), ShardSpan(own.heads, own.head_dim)
        self.in_proj = Linear(
            in_features=hidden,
            out_features=2 * channels.size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.in_proj",
            partition="output",
            spans=(channels, channels),
            groups=own.heads,
        )
        self.conv1d = CausalConv(
            spans=(channels,), taps=own.taps, bias=False, silu=True, name=f"{prefix}.conv1d"
        )
        self.widths = [own.states, own.states, own.rank]
        self.x_proj = Linear(
            in_features=channels.size,
            out_features=sum(self.widths),
            bias=False,
            dtype=dtype,
            name=f"{prefix}.x_proj",
            partition="input",
        )
        self.b_norm, self.c_norm, self.dt_norm = (
            HeadRMSNorm(
                size=size, eps=config.arch.norm_eps, dtype=activation_dtype(config), name=f"{prefix}.{name}"
            )
            for name, size in zip(("b_norm", "c_norm", "dt_norm"), self.widths, strict=True)
        )
        self.dt_proj = Linear(
            in_features=own.rank,
            out_features=own.heads,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.dt_proj",
            partition="output",
            spans=(heads,),
        )
        self.scan = HeadScan(
            heads=own.heads, groups=1, time_limits=(0.0, float("inf")), name=f"{prefix}.scan"
        )
        self.out_proj = Linear(
            in_features=channels.size,
            out_features=hidden,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.out_proj",
            partition="input",
        )
        parts = [(own.taps - 1, (channels,)), ((heads,), own.states, own.head_dim)]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)

    def reads(self, source: RowSource) -> None:
        """See `SelfAttention.reads`."""
        self.in_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        metadata, (conv_states, states) = self.cache.metadata(step), self.cache.views
        gate, x = self.in_proj(x, step).chunk(2, 1)
        x = self.conv1d(x, conv_states, metadata)
        b, c, dt = self.x_proj(x, step).split(self.widths, 1)
        dt = self.dt_proj(self.dt_norm(dt), step)
        out = self.scan(x, dt, self.b_norm(b), self.c_norm(c), gate, states, metadata)
        return self.out_proj(out, step)


_SHARPNESS = -8.0
"""The paper's constant c (how fast a channel may forget), with the sign of its logarithm."""


class RGLRU(Layer):
    """Real-gated linear recurrent unit; each head computes its two gates from its own channels."""

    def __init__(self, *, heads: int, size: int, name: str) -> None:
        super().__init__(name)
        self.heads = ShardSpan(heads)
        self.size = size
        self.create_weights(None)

    def create_weights(self, method: QuantMethod | None, shard: Shard = WHOLE) -> None:
        self.shard = shard
        self.own = self.heads.piece(shard, self.name)
        count = length(self.own)
        self.gates = parameter(count, self.size, 2 * self.size, dtype=torch.float32)
        self.gate_bias = parameter(count, 2 * self.size, dtype=torch.float32)
        self.rates = parameter(count * self.size, dtype=torch.float32)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        heads, size, own = self.heads.size, self.size, self.own
        every, columns = slice(0, heads), slice(0, size)
        matrices = TensorPart((heads, size, size), (every, columns, columns), (own, columns, columns))
        vectors = TensorPart((heads, size), (every, columns), (own, columns))
        for index, gate in enumerate(("input_gate", "recurrent_gate")):
            place = slice(index * size, (index + 1) * size)
            yield f"{names[0]}.{gate}_weight", Slot(self.gates[:, :, place], "normal", matrices)
            yield f"{names[0]}.{gate}_bias", Slot(self.gate_bias[:, place], "zeros", vectors)
        channels = slice(own.start * size, own.stop * size)
        part = TensorPart((heads * size,), (slice(0, heads * size),), (channels,))
        yield f"{names[0]}.recurrent_param", Slot(self.rates, "zeros", part, convert=_rates)

    def forward(self, x: Tensor, states: Tensor, metadata: StateMetadata) -> Tensor:
        """x [T, W] -> [T, W]; see `ops.rg_lru`."""
        return ops.rg_lru(x, self.gates, self.gate_bias, self.rates, states, metadata)


def _rates(stored: Tensor) -> Tensor:
    return _SHARPNESS * softplus(stored.float())


class RecurrentUnit(Module):
    """Griffin's recurrent block: `out(act(y) * rg_lru(conv(x)))`; y and x are two projections of one input."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, own = config.arch, config.arch.recurrent_unit
        assert own is not None, "a layer of this kind is described"
        channels = ShardSpan(own.heads, own.width // own.heads)
        self.linear_yx = Linear(
            in_features=arch.hidden_size,
            out_features=2 * own.width,
            bias=True,
            dtype=model_dtype(config),
            name=f"{prefix}.linear_yx",
            partition="output",
            spans=(channels, channels),
        )
        self.conv_1d = CausalConv(spans=(channels,), taps=own.taps, bias=True, name=f"{prefix}.conv_1d")
        self.rg_lru = RGLRU(heads=own.heads, size=channels.unit, name=f"{prefix}.rg_lru")
        self.linear_out = Linear(
            in_features=own.width,
            out_features=arch.hidden_size,
            bias=True,
            dtype=model_dtype(config),
            name=f"{prefix}.linear_out",
            partition="input",
        )
        self.act_fn = PLAIN[arch.hidden_act]
        parts = [(own.taps - 1, (channels,)), ((channels,),)]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)

    def reads(self, source: RowSource) -> None:
        """See `SelfAttention.reads`."""
        self.linear_yx.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        metadata, (conv_states, states) = self.cache.metadata(step), self.cache.views
        y, x = self.linear_yx(x, step).chunk(2, 1)
        x = self.rg_lru(self.conv_1d(x, conv_states, metadata), states, metadata)
        return self.linear_out(self.act_fn(y) * x, step)
