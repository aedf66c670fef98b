# SPDX-License-Identifier: Apache-2.0
"""Codec of one of two matrices with alternating outputs, in a module whose tensors cannot be sliced into the two."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from quire.kernels.formats import Numbers
from quire.kernels.linear import WeightScheme
from quire.layers.quantized.codec import Codec, Coded, Stored


@dataclass(frozen=True)
class Alternate(Codec):
    """Outputs `half`, `half` + 2 and so on of the matrix that `both` decodes from all of the module's tensors."""

    both: Codec
    half: int
    cuts = False

    @property
    def input_unit(self) -> int:
        return self.both.input_unit

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return self.both.scheme(num_inputs, present)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        return self.both.tensors(2 * num_outputs, num_inputs)

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        decoded, own = self.both.decoded(tensors), slice(self.half, None, 2)
        if isinstance(decoded, Tensor):
            return decoded[own]
        data, *streams = decoded.numbers
        cut = (each[own] if isinstance(each, Tensor) else each for each in streams)
        return replace(decoded, numbers=Numbers(data[own], *cut))
