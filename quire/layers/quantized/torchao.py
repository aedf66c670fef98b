"""Tensor classes of torchao, as it writes them in safetensors: each of their parts is a tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.linear import WeightScheme
from quire.layers.quantized.codec import Codec, Coded, Grid, Stored, inputs, outputs, scheme_of
from quire.layers.quantized.integers import with_sign


@dataclass(frozen=True)
class TorchAo(Codec):
    """qdata [N, K], int8 or float8_e4m3fn, with scales on a grid and perhaps zero points."""

    floats: bool = False
    grid_outputs: int = 1
    grid_inputs: int = 0

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        kind = "fp8" if self.floats else "int8"
        return scheme_of(kind, self.grid_inputs, shifted="_weight_zero_point" in present)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        grid = Grid(self.grid_outputs, self.grid_inputs).axes
        data = Stored((outputs(), inputs()), (torch.float8_e4m3fn if self.floats else torch.int8,))
        tensors = {"_weight_qdata": data, "_weight_scale": Stored(grid, flat=True)}
        zeros = Stored(grid, (torch.int8,), optional=True, flat=True)
        return tensors if self.floats else tensors | {"_weight_zero_point": zeros}

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        data, grid = tensors["_weight_qdata"], Grid(self.grid_outputs, self.grid_inputs)
        if self.floats:
            return Coded.of("fp8", grid.inputs, data, grid.by_row(tensors["_weight_scale"], len(data)))
        return with_sign(grid, data, tensors["_weight_scale"], tensors.get("_weight_zero_point"))
