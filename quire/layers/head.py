# SPDX-License-Identifier: Apache-2.0
"""Linear layers of heads after the hidden states, such as classifiers; float32 on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from quire.config.pooling import HeadLayer
from quire.layers.linear import Linear
from quire.layers.quantization import QuantMethod
from quire.layers.shard import WHOLE, Shard
from quire.layers.slot import Slot, TensorPart


class HeadLinear(Linear):
    """Layer of a head; never quantized, because it is small and users compare its output."""

    is_replicated = True

    def __init__(self, layer: HeadLayer, prefix: str = "") -> None:
        super().__init__(
            in_features=layer.inputs,
            out_features=layer.outputs,
            bias=layer.bias,
            dtype=torch.float32,
            name=prefix + layer.name,
        )

        self.is_of_adapters = False
        """True if the checkpoint lacks it: its output is 0 and unused without an adapter."""
        self._taken = layer.rows
        self._num_stored = layer.num_stored

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        super().create_weights(method.unrounded(), shard)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        """Yield slots; if only some outputs are used, one slot per output, shared with other readers of the tensor."""
        if self.is_of_adapters:
            return
        if not self._taken:
            yield from super().slots(names)
            return
        for kind, target in (("weight", self.weight), ("bias", self.bias)):
            for index, row in enumerate(self._taken if target is not None else ()):
                assert target is not None, "only present tensors are stored"
                rest = tuple(slice(0, size) for size in target.shape[1:])
                box = (slice(row, row + 1), *rest)
                part = TensorPart((self._num_stored, *target.shape[1:]), box, box)
                yield f"{names[0]}.{kind}", Slot(target[index : index + 1], "normal", part, shared=True)

    def finish_loading(self) -> None:
        if self.is_of_adapters:
            for parameter in self.parameters():
                nn.init.zeros_(parameter)
        super().finish_loading()


class TableLinear(HeadLinear):
    """Head layer whose weight is a shared table, and whose bias has a name of its own in the checkpoint."""

    def __init__(self, layer: HeadLayer, *, table: str, bias: str, prefix: str = "") -> None:
        super().__init__(layer, prefix)
        self._tensors = table, bias

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        table, bias = self._tensors
        assert self.weight is not None
        assert self.bias is not None
        yield table, Slot(self.weight, "normal", shared=True)
        yield bias, Slot(self.bias, "zeros")
