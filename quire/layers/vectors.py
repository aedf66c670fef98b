"""Layers that have a number for each head, channel or dimension, or a few of them, and no matrix."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.layers.base import Layer, parameter
from quire.layers.shard import WHOLE, Shard, Span
from quire.layers.slot import Init, Part, Slot, length

if TYPE_CHECKING:
    from quire.layers.quantization import QuantMethod


@dataclass(frozen=True)
class Vector:
    """One of a layer's vectors."""

    attribute: str
    stored: str
    """What the checkpoint calls it, behind the layer's name; nothing, if that is its name."""
    init: Init = "zeros"
    convert: Callable[[Tensor], Tensor] | None = None
    """As in `Slot`."""


class VectorLayer(Layer):
    """Base of layers with vectors [N], all of them cut as `span` is.

    With `beside` the checkpoint has them beside a module of this layer's name, and not in it.
    """

    vectors: tuple[Vector, ...] = ()

    def __init__(
        self, span: Span, *, dtype: torch.dtype = torch.float32, beside: bool = False, name: str = ""
    ) -> None:
        super().__init__(name)
        self.span, self.dtype, self.beside = span, dtype, beside
        self.create_weights(None)

    def create_weights(self, method: "QuantMethod | None", shard: Shard = WHOLE) -> None:
        self.shard = shard
        self.own = self.span.piece(shard, self.name)
        for vector in self.vectors:
            setattr(self, vector.attribute, parameter(length(self.own), dtype=self.dtype))

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        at = names[0].rpartition(".")[0] if self.beside else names[0]
        part = Part((self.span.size,), (slice(0, self.span.size),), (self.own,))
        for vector in self.vectors:
            stored = ".".join(filter(None, (at, vector.stored)))
            yield stored, Slot(getattr(self, vector.attribute), vector.init, part, convert=vector.convert)
