# SPDX-License-Identifier: Apache-2.0
"""Layers with one or a few numbers per head, channel or dimension, and no weight matrix."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Layer, activation_dtype, parameter
from quire.layers.shard import WHOLE, Shard, ShardSpan
from quire.layers.slot import Init, Slot, TensorPart, length

if TYPE_CHECKING:
    from quire.layers.quantization import QuantMethod


@dataclass(frozen=True)
class LayerVector:
    """One of a layer's vectors."""

    attribute: str
    stored: str
    """Name in the checkpoint after the layer's name; empty if it is the layer's name itself."""
    init: Init = "zeros"
    convert: Callable[[Tensor], Tensor] | None = None
    """See `Slot`."""
    unit: int = 1
    """Numbers per element of the layer's span."""
    around: tuple[int, int] = (0, 0)
    """Dimensions of size 1 that the checkpoint has before and after it."""


class VectorLayer(Layer):
    """Base of layers with vectors [N], or a multiple of N, all sharded by `span`.

    With `beside` the checkpoint stores them next to a module of this layer's name instead of in it.
    """

    vectors: tuple[LayerVector, ...] = ()

    def __init__(
        self, span: ShardSpan, *, dtype: torch.dtype = torch.float32, beside: bool = False, name: str = ""
    ) -> None:
        super().__init__(name)
        self.span, self.dtype, self.beside = span, dtype, beside
        self.create_weights(None)

    def create_weights(self, method: "QuantMethod | None", shard: Shard = WHOLE) -> None:
        self.shard = shard
        self.own = self.span.piece(shard, self.name)
        for vector in self.vectors:
            setattr(self, vector.attribute, parameter(length(self.own) * vector.unit, dtype=self.dtype))

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        at = names[0].rpartition(".")[0] if self.beside else names[0]
        for vector in self.vectors:
            stored = ".".join(filter(None, (at, vector.stored)))
            target = getattr(self, vector.attribute)
            yield stored, Slot(target, vector.init, self._part(vector), convert=vector.convert)

    def _part(self, vector: LayerVector) -> TensorPart:
        size, (before, behind) = self.span.size * vector.unit, vector.around
        own = slice(self.own.start * vector.unit, self.own.stop * vector.unit)
        return TensorPart((size,), (slice(0, size),), (own,), (*[1] * before, size, *[1] * behind))


class OutBias(VectorLayer):
    """Bias added to a block's summed output, whole on each rank."""

    vectors = (LayerVector("bias", "bias"),)
    bias: Tensor

    def __init__(self, *, config: EngineConfig, name: str) -> None:
        size = ShardSpan(1, config.arch.hidden_size, replicated=True)
        super().__init__(size, dtype=activation_dtype(config), beside=True, name=name)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return x + self.bias
