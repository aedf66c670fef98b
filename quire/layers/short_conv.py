"""The short convolution of LFM2 (Liquid AI, 2025, arXiv:2511.23404), between two gates.

Shapes: T tokens of the step, H hidden size.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Module, RowSource, model_dtype
from quire.layers.causal_conv import CausalConv
from quire.layers.linear import Linear
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import Span
from quire.layers.states import StateCache
from quire.layers.step import StepContext


class ShortConv(Module):
    """`out(c * conv(b * x))`, of which `in_proj` makes b, c and x."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, own = config.arch, config.arch.short_conv
        assert own is not None, "a layer of this kind is described"
        size, channels = arch.hidden_size, Span(arch.hidden_size)
        self.in_proj = Linear(
            in_features=size,
            out_features=3 * size,
            bias=own.bias,
            dtype=model_dtype(config),
            name=f"{prefix}.in_proj",
            cut="output",
            spans=(channels,) * 3,
        )
        self.conv = CausalConv(spans=(channels,), taps=own.taps, bias=own.bias, name=f"{prefix}.conv")
        self.out_proj = Linear(
            in_features=size,
            out_features=size,
            bias=own.bias,
            dtype=model_dtype(config),
            name=f"{prefix}.out_proj",
            cut="input",
        )
        parts = [(own.taps - 1, (channels,))]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)

    def reads(self, source: RowSource) -> None:
        """As `SelfAttention.reads`."""
        self.in_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        b, c, x = self.in_proj(x, step).chunk(3, 1)
        mixed = self.conv(b * x, *self.cache.views, self.cache.metadata(step))
        return self.out_proj(c * mixed, step)
