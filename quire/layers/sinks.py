"""Attention sinks (Xiao et al., 2023, arXiv:2309.17453), as gpt-oss learns them (2025, arXiv:2508.10925)."""

from torch import Tensor

from quire.layers.shard import Span
from quire.layers.vectors import Vector, VectorLayer


class Sinks(VectorLayer):
    """A score for each head that joins every softmax and has no value, float32 [Hq]; cut by heads."""

    vectors = (Vector("weight", ""),)
    weight: Tensor

    def __init__(self, *, num_heads: int, name: str = "") -> None:
        super().__init__(Span(num_heads), name=name)
