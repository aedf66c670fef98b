"""The recurrent block of Griffin (S. De et al., 2024, arXiv:2402.19427): a convolution and a gated linear recurrence.

Shapes: T tokens of the step, H hidden size, W width, h heads of size D = W / h.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from quire.config import EngineConfig
from quire.kernels import ops
from quire.kernels.attention_metadata import StateMetadata
from quire.layers.activation import PLAIN
from quire.layers.base import Layer, Module, RowSource, model_dtype, parameter
from quire.layers.causal_conv import CausalConv
from quire.layers.linear import Linear
from quire.layers.quantization import QuantMethod
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import WHOLE, Shard, Span
from quire.layers.slot import Part, Slot, length
from quire.layers.states import StateCache
from quire.layers.step import StepContext

_SHARPNESS = -8.0
"""How fast a channel may forget: the constant c of the paper, and the sign of its logarithm."""


class RGLRU(Layer):
    """Real-gated linear recurrent units, of which each head makes its two gates of its own channels."""

    def __init__(self, *, heads: int, size: int, name: str) -> None:
        super().__init__(name)
        self.heads = Span(heads)
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
        matrices = Part((heads, size, size), (every, columns, columns), (own, columns, columns))
        vectors = Part((heads, size), (every, columns), (own, columns))
        for index, gate in enumerate(("input_gate", "recurrent_gate")):
            place = slice(index * size, (index + 1) * size)
            yield f"{names[0]}.{gate}_weight", Slot(self.gates[:, :, place], "normal", matrices)
            yield f"{names[0]}.{gate}_bias", Slot(self.gate_bias[:, place], "zeros", vectors)
        channels = slice(own.start * size, own.stop * size)
        part = Part((heads * size,), (slice(0, heads * size),), (channels,))
        yield f"{names[0]}.recurrent_param", Slot(self.rates, "zeros", part, convert=_rates)

    def forward(self, x: Tensor, states: Tensor, metadata: StateMetadata) -> Tensor:
        """x [T, W] -> [T, W]; see `ops.rg_lru`."""
        return ops.rg_lru(x, self.gates, self.gate_bias, self.rates, states, metadata)


def _rates(stored: Tensor) -> Tensor:
    return _SHARPNESS * softplus(stored.float())


class RecurrentUnit(Module):
    """`out(act(y) * rg_lru(conv(x)))`, where y and x are two projections of the same."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, own = config.arch, config.arch.recurrent_unit
        assert own is not None, "a layer of this kind is described"
        channels = Span(own.heads, own.width // own.heads)
        self.linear_yx = Linear(
            in_features=arch.hidden_size,
            out_features=2 * own.width,
            bias=True,
            dtype=model_dtype(config),
            name=f"{prefix}.linear_yx",
            cut="output",
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
            cut="input",
        )
        self.act_fn = PLAIN[arch.hidden_act]
        parts = [(own.taps - 1, (channels,)), ((channels,),)]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)

    def reads(self, source: RowSource) -> None:
        """As `SelfAttention.reads`."""
        self.linear_yx.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        metadata, (conv_states, states) = self.cache.metadata(step), self.cache.views
        y, x = self.linear_yx(x, step).chunk(2, 1)
        x = self.rg_lru(self.conv_1d(x, conv_states, metadata), states, metadata)
        return self.linear_out(self.act_fn(y) * x, step)
