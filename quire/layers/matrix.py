"""What the layers around one large matrix share: how it is packed when it is loaded, and how it is found packed.

Invariant: a matrix exists once. Before `pack` it is the plain `weight`, afterwards the form that the device's kernels
read; where there are none, `weight` stays, and a quantised one is what its integers stand for.
"""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from quire.kernels import ops, reference
from quire.kernels.linear import FLOAT, PackedWeight, WeightScheme
from quire.layers.base import Layer, parameter

_PACKED = "packed."


class MatrixLayer(Layer):
    """Base of layers with a `weight` [N, K]."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = parameter(outputs, inputs, dtype=dtype)
        self.packed: PackedWeight | None = None

    def tensors(self) -> dict[str, Tensor]:
        parts = {} if self.packed is None else self.packed.tensors()
        return super().tensors() | {_PACKED + name: part for name, part in parts.items()}

    def restore(self, tensors: Mapping[str, Tensor], scheme: WeightScheme) -> None:
        plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PACKED)}
        parts = {name.removeprefix(_PACKED): tensors[name] for name in tensors.keys() - plain.keys()}
        super().restore(plain, scheme)
        if parts:
            assert self.weight is not None, "a layer is restored once"
            self.packed = PackedWeight.of(scheme, self.weight.shape, self.halves(), parts)
            self.weight = None

    def pack(self, scheme: WeightScheme) -> None:
        """Bring the weight into the one form in which it is kept."""
        assert self.weight is not None, "a layer is finished once"
        weight = self.weight
        if self.replaced(weight.device.type, scheme):
            self.weight, self.packed = None, ops.pack_weight(weight.data, scheme, self.halves())
        elif scheme.kind != "float":
            self.adopt(reference.unpack_weight(ops.pack_weight(weight.data, scheme)))

    def replaced(self, device_type: str, scheme: WeightScheme) -> Collection[str]:
        assert self.weight is not None, "asked before the layer is finished"
        takes = ops.pack_weight.takes(device_type, self.weight, scheme, self.halves())
        return ("weight",) if takes else ()

    def adopt(self, weight: Tensor) -> None:
        """Make this tensor the weight."""
        self.weight = nn.Parameter(weight, requires_grad=False)

    def adopter(self) -> Callable[[Tensor], None] | None:
        """`adopt` for a slot whose tensor is all of the weight and is packed straight from the file's memory.

        Only on a CPU, where the file is mapped and every scheme is packed.
        """
        packs = self.weight is not None and self.weight.is_cpu and self.replaced("cpu", FLOAT)
        return self.adopt if packs else None

    def halves(self) -> int:
        """In how many parts the outputs are packed."""
        return 1
