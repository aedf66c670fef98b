"""Attention sinks (Xiao et al., 2023, arXiv:2309.17453), as gpt-oss learns them (2025, arXiv:2508.10925)."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from quire.layers.base import Layer, parameter
from quire.layers.shard import WHOLE, Shard, Span
from quire.layers.slot import Part, Slot

if TYPE_CHECKING:
    from quire.layers.quantization import QuantMethod


class Sinks(Layer):
    """A score for each head that joins every softmax and has no value, float32 [Hq]; cut by heads."""

    def __init__(self, *, num_heads: int, name: str = "") -> None:
        super().__init__(name)
        self._heads = Span(num_heads)
        self.weight = parameter(num_heads, dtype=torch.float32)

    def create_weights(self, method: "QuantMethod", shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self._own = self._heads.piece(shard, self.name)
        self.weight = parameter(self._own.stop - self._own.start, dtype=torch.float32)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        every = slice(0, self._heads.size)
        yield names[0], Slot(self.weight, "zeros", Part((every.stop,), (every,), (self._own,)))
