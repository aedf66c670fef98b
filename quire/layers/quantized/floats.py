# SPDX-License-Identifier: Apache-2.0
"""Codec of float modules in checkpoints with other, quantized modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quire.layers.quantized.codec import Codec, Coded, Stored, inputs, outputs


@dataclass(frozen=True)
class Floats(Codec):
    """weight [N, K]."""

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        return {"weight": Stored((outputs(), inputs()))}

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        return tensors["weight"]
