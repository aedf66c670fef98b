# SPDX-License-Identifier: Apache-2.0
"""Mixers of RWKV-7 (B. Peng et al., 2025, arXiv:2503.14456): time mixing with a state, and channel mixing.

Each also reads the previous token's input, which it keeps as a state. Shapes: T tokens of the step, H hidden size,
h heads of size D, R rank of low-rank projections.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import RWKV7Arch
from quire.kernels import ops
from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.linear import Function
from quire.layers.base import Layer, Module, model_dtype, parameter
from quire.layers.linear import Linear
from quire.layers.shard import WHOLE, Partition, Shard, ShardSpan
from quire.layers.slot import Init, Slot, TensorPart, length
from quire.layers.states import Shape, StateCache
from quire.layers.step import StepContext

if TYPE_CHECKING:
    from quire.layers.quantization import QuantMethod


class VectorRows(Layer):
    """Vectors of one size as rows of a tensor, float32 [N, size], all sharded by `span`.

    `stored` has the name of each in the checkpoint, beside this layer, its shape there, and its random initialization.
    """

    rows: Tensor

    def __init__(
        self, stored: Sequence[tuple[str, tuple[int, ...], Init]], span: ShardSpan, name: str
    ) -> None:
        super().__init__(name)
        self._stored, self._span = tuple(stored), span
        self.create_weights(None)

    def create_weights(self, method: "QuantMethod | None", shard: Shard = WHOLE) -> None:
        self.shard, self._own = shard, self._span.piece(shard, self.name)
        self.rows = parameter(len(self._stored), length(self._own), dtype=torch.float32)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        at, size = names[0].rpartition(".")[0], self._span.size
        for row, (stored, shape, init) in zip(self.rows, self._stored, strict=True):
            yield (
                f"{at}.{stored}",
                Slot(row, init, TensorPart((size,), (slice(0, size),), (self._own,), shape)),
            )


class TokenShift(VectorRows):
    """`x + (previous x - x) * mix`, for several mixes."""

    taps: Tensor

    def __init__(self, stored: Sequence[tuple[str, tuple[int, ...]]], size: int, name: str) -> None:
        rows: list[tuple[str, tuple[int, ...], Init]] = [(key, shape, "normal") for key, shape in stored]
        super().__init__(rows, ShardSpan(1, size, replicated=True), name)
        taps = torch.tensor([[1.0], [0.0]], device="cpu").repeat(1, size)
        self.register_buffer("taps", taps, persistent=False)

    def forward(self, x: Tensor, states: Tensor, metadata: StateMetadata) -> list[Tensor]:
        """x [T, H], states [blocks, 1, H] -> [T, H] for each mix."""
        delta = ops.causal_conv(x, self.taps, None, states, metadata) - x
        return [x + delta * mix for mix in self.rows]


class TimeMix(Module):
    """Time mixing: a recurrent state per head; later layers mix their values with those of the first.

    Heads are sharded; inputs of low-rank projections are replicated.
    """

    def __init__(self, *, config: EngineConfig, prefix: str, layer: int) -> None:
        super().__init__()
        size, own, heads = config.arch.hidden_size, rwkv7_of(config), heads_of(config)
        shifted = [(f"x_{name}", (1, 1, size)) for name in "rwkvag"]
        self.shift = TokenShift(shifted, size, f"{prefix}.shift")
        self.of_heads = VectorRows(
            [
                ("k_k", (size,), "normal"),
                ("k_a", (size,), "normal"),
                ("r_k", (size // own.head_dim, own.head_dim), "normal"),
                ("g_norm.weight", (size,), "ones"),
                ("g_norm.bias", (size,), "zeros"),
            ],
            heads,
            f"{prefix}.of_heads",
        )
        self.r_proj, self.k_proj, self.v_proj = (
            _linear(config, size, heads, f"{prefix}.{name}_proj") for name in "rkv"
        )
        self.o_proj = _linear(config, size, size, f"{prefix}.o_proj", partition="input")
        self.w_down = _linear(config, size, own.decay_rank, f"{prefix}.w_down", activation="tanh")
        self.w_up = _linear(config, own.decay_rank, heads, f"{prefix}.w_up", bias=True)
        self.a_down = _linear(config, size, own.rate_rank, f"{prefix}.a_down")
        self.a_up = _linear(config, own.rate_rank, heads, f"{prefix}.a_up", bias=True)
        self.g_down = _linear(config, size, own.gate_rank, f"{prefix}.g_down", activation="sigmoid")
        self.g_up = _linear(config, own.gate_rank, heads, f"{prefix}.g_up")
        self.v_down = self.v_up = None
        if layer:
            self.v_down = _linear(config, size, own.value_rank, f"{prefix}.v_down")
            self.v_up = _linear(
                config, own.value_rank, heads, f"{prefix}.v_up", bias=True, activation="sigmoid"
            )
        self.norm_eps = own.head_dim * config.arch.norm_eps

    def forward(
        self, x: Tensor, first: Tensor | None, cache: StateCache, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """x [T, H] and the first layer's values, None in that layer -> [T, H] and those values."""
        metadata, (before, _, states) = cache.metadata(step), cache.views
        xr, xw, xk, xv, xa, xg = self.shift(x, before, metadata)
        v = self.v_proj(xv, step)
        if self.v_down is None or self.v_up is None or first is None:
            first = v
        else:
            v = v + (first - v) * self.v_up(self.v_down(xv, step), step)
        out = ops.rwkv7(
            self.r_proj(xr, step),
            self.w_up(self.w_down(xw, step), step),
            self.k_proj(xk, step),
            v,
            self.a_up(self.a_down(xa, step), step),
            self.of_heads.rows,
            states,
            metadata,
            self.norm_eps,
        )
        return self.o_proj(out * self.g_up(self.g_down(xg, step), step), step), first


class ChannelMix(Module):
    """Channel mixing: `value(relu(key(x))^2)` of a token and the previous one."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        size, inner = config.arch.hidden_size, config.arch.intermediate_size
        self.shift = TokenShift([("x_k", (size,))], size, f"{prefix}.shift")
        self.key = _linear(config, size, ShardSpan(inner), f"{prefix}.key", activation="relu2")
        self.value = _linear(config, inner, size, f"{prefix}.value", partition="input")

    def forward(self, x: Tensor, cache: StateCache, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        (mixed,) = self.shift(x, cache.views[1], cache.metadata(step))
        return self.value(self.key(mixed, step), step)


def state_cache(config: EngineConfig, name: str) -> StateCache:
    """Return a layer's cache: the previous inputs of time mixing and channel mixing, and the heads' states."""
    size, dim = config.arch.hidden_size, rwkv7_of(config).head_dim
    heads: Shape = ((ShardSpan(size // dim),), dim, dim)
    return StateCache(config=config, name=name, parts=[(1, size), (1, size), heads])


def heads_of(config: EngineConfig) -> ShardSpan:
    """Return the span of the heads' channels."""
    dim = rwkv7_of(config).head_dim
    return ShardSpan(config.arch.hidden_size // dim, dim)


def rwkv7_of(config: EngineConfig) -> RWKV7Arch:
    """Return the RWKV-7 section of the config."""
    own = config.arch.rwkv7
    assert own is not None, "a layer of this kind is described"
    return own


def _linear(
    config: EngineConfig,
    inputs: int,
    outputs: int | ShardSpan,
    name: str,
    *,
    bias: bool = False,
    activation: Function | None = None,
    partition: Partition = "whole",
) -> Linear:
    """Return a linear layer; outputs given as a span are sharded."""
    spans = (outputs,) if isinstance(outputs, ShardSpan) else ()
    return Linear(
        in_features=inputs,
        out_features=outputs.size if isinstance(outputs, ShardSpan) else outputs,
        bias=bias,
        dtype=model_dtype(config),
        name=name,
        partition="output" if spans else partition,
        spans=spans,
        activation=activation,
    )
