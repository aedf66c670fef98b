"""A convolution of each channel over its last inputs, which are kept as a state.

Shapes: T tokens of the step, C channels, K taps.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.attention_metadata import StateMetadata
from quire.layers.base import Layer, parameter
from quire.layers.quantization import QuantMethod
from quire.layers.shard import WHOLE, Shard, Span
from quire.layers.slot import Part, Slot


class CausalConv(Layer):
    """The checkpoint's depthwise `conv1d` [C, 1, K], kept as [K, C].

    `spans` are channels that are cut apart; the checkpoint may have a convolution for each.
    """

    def __init__(
        self, *, spans: Sequence[Span], taps: int, bias: bool, silu: bool = False, name: str
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
                Slot(weight, "normal", Part((total, 1, self.taps), (region, *sides), (taken, *sides))),
            )
            if self.bias is not None:
                yield (
                    f"{name}.bias",
                    Slot(self.bias[place:end], "zeros", Part((total,), (region,), (taken,))),
                )
            firsts[name], place = first + span.size, end

    def forward(self, x: Tensor, states: Tensor, metadata: StateMetadata) -> Tensor:
        """x [T, C], states [blocks, K - 1, C] -> [T, C]."""
        return ops.causal_conv(x, self.weight, self.bias, states, metadata, self.silu)
