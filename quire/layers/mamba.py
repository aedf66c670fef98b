"""Mamba's mixer (Gu and Dao, 2023, arXiv:2312.00752): a convolution, and a state space whose steps the token chooses.

Shapes: T tokens of the step, H hidden size, C channels, N states of each, R numbers of which time steps are made.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.kernels.attention_metadata import StateMetadata
from quire.layers.base import Module, RowSource, activation_dtype, model_dtype, parameter
from quire.layers.causal_conv import CausalConv
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.quantization import QuantMethod
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import WHOLE, Shard, Span
from quire.layers.slot import Part, Slot, length
from quire.layers.states import StateCache
from quire.layers.step import StepContext
from quire.layers.vectors import Vector, VectorLayer


class SelectiveScan(VectorLayer):
    """The recurrence of each channel, as `ops.selective_scan` says; the checkpoint has `A_log` [C, N] of its decays."""

    vectors = (Vector("skip", "D", "ones"),)
    skip: Tensor

    def __init__(self, *, channels: int, states: int, name: str) -> None:
        self.states = states
        super().__init__(Span(channels), name=name)

    def create_weights(self, method: QuantMethod | None, shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self.a = parameter(self.states, length(self.own), dtype=torch.float32)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield from super().slots(names)
        every, states = slice(0, self.span.size), slice(0, self.states)
        matrix = Part((every.stop, states.stop), (every, states), (self.own, states))
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
    """`x / rms(x)`."""

    ones: Tensor

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(size, dtype=dtype, device="cpu"), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.ones, self.eps)


class MambaMixer(Module):
    """`out(scan(conv(x)) * silu(z))`, where `in_proj` makes x and z, and `x_proj` what else the scan reads."""

    dt_layernorm: RMSNorm | UnitRMSNorm
    b_layernorm: RMSNorm | UnitRMSNorm
    c_layernorm: RMSNorm | UnitRMSNorm

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        own, hidden, dtype = config.arch.mamba, config.arch.hidden_size, model_dtype(config)
        assert own is not None, "a layer of this kind is described"
        channels = Span(own.channels)
        self.in_proj = Linear(
            in_features=hidden,
            out_features=2 * own.channels,
            bias=own.bias,
            dtype=dtype,
            name=f"{prefix}.in_proj",
            cut="output",
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
            cut="input",
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
            cut="output",
        )
        self.scan = SelectiveScan(channels=own.channels, states=own.states, name=f"{prefix}.scan")
        self.out_proj = Linear(
            in_features=own.channels,
            out_features=hidden,
            bias=own.bias,
            dtype=dtype,
            name=f"{prefix}.out_proj",
            cut="input",
        )
        parts = [(own.taps - 1, (channels,)), (own.states, (channels,))]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)

    def reads(self, source: RowSource) -> None:
        """As `SelfAttention.reads`."""
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
    """Of what `x_proj` makes."""
    own, dtype = config.arch.mamba, activation_dtype(config)
    assert own is not None
    assert own.norm_eps is not None
    if own.norm_weight:
        return RMSNorm(size=size, eps=own.norm_eps, dtype=dtype, name=name)
    return UnitRMSNorm(size, own.norm_eps, dtype)


def negative_exp(stored: Tensor) -> Tensor:
    """What `A_log` stands for."""
    return -stored.float().exp()
