"""What stands between pooled vectors and the numbers that a model gives out: linear layers in float32.

Shapes: N vectors, of texts or of tokens.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from quire.config.pooling import HeadLayer
from quire.layers.base import Module
from quire.layers.linear import Linear
from quire.layers.quantization import QuantMethod
from quire.layers.shard import WHOLE, Shard
from quire.layers.slot import Part, Slot
from quire.layers.step import StepContext

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "excess": lambda x: x[:, 1:] - x[:, :1],
}


class HeadLinear(Linear):
    """A layer of a head. It is small, and what it gives is what a user compares: it is never rounded."""

    def __init__(self, layer: HeadLayer, prefix: str = "") -> None:
        super().__init__(
            in_features=layer.inputs,
            out_features=layer.outputs,
            bias=layer.bias,
            dtype=torch.float32,
            name=prefix + layer.name,
        )

        self.is_of_adapters = False
        """Whether the checkpoint has none: what it makes without an adapter's is 0, and nobody asks for it."""
        self._taken = layer.rows
        self._num_stored = layer.num_stored

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        super().create_weights(method.unrounded(), shard)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        """Of a module of which some outputs are computed, each by itself, beside whoever else reads them."""
        if self.is_of_adapters:
            return
        if not self._taken:
            yield from super().slots(names)
            return
        for kind, target in (("weight", self.weight), ("bias", self.bias)):
            for index, row in enumerate(self._taken if target is not None else ()):
                assert target is not None, "it was asked"
                rest = tuple(slice(0, size) for size in target.shape[1:])
                box = (slice(row, row + 1), *rest)
                part = Part((self._num_stored, *target.shape[1:]), box, box)
                yield f"{names[0]}.{kind}", Slot(target[index : index + 1], "normal", part, shared=True)

    def finish_loading(self) -> None:
        if self.is_of_adapters:
            for parameter in self.parameters():
                nn.init.zeros_(parameter)
        super().finish_loading()


class TableLinear(HeadLinear):
    """One whose matrix is a table that others read, too, and whose bias is called as a checkpoint likes."""

    def __init__(self, layer: HeadLayer, *, table: str, bias: str, prefix: str = "") -> None:
        super().__init__(layer, prefix)
        self._tensors = table, bias

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        table, bias = self._tensors
        assert self.weight is not None
        assert self.bias is not None
        yield table, Slot(self.weight, "normal", shared=True)
        yield bias, Slot(self.bias, "zeros")


class PoolingHead(Module):
    """Layers one behind the other; without any, vectors are given out as they are."""

    def __init__(self, layers: Sequence[HeadLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HeadLinear(layer) for layer in layers)
        self._names = [layer.name for layer in layers]
        self._activations = [ACTIVATIONS[layer.activation] for layer in layers]

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """float32 [N, inputs] -> [N, outputs]; of the step there is no more than the adapters of these rows."""
        for layer, activation in zip(self.layers, self._activations, strict=True):
            x = activation(layer(x, step))
        return x

    def checkpoint_layers(self) -> Iterator[tuple[list[str], HeadLinear]]:
        """As a model's."""
        for name, layer in zip(self._names, self.layers, strict=True):
            assert isinstance(layer, HeadLinear)
            yield [name], layer
