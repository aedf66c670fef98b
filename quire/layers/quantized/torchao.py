"""Tensor classes of torchao, as it writes them in safetensors: each of their parts is a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.quantized.codec import Codec, Coded, Grid, Stored, inputs, outputs


@dataclass(frozen=True)
class TorchAo(Codec):
    """qdata [N, K], int8 or float8_e4m3fn, with scales on a grid and perhaps zero points."""

    floats: bool = False
    grid_outputs: int = 1
    grid_inputs: int = 0

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        grid = Grid(self.grid_outputs, self.grid_inputs).axes
        data = Stored((outputs(), inputs()), (torch.float8_e4m3fn if self.floats else torch.int8,))
        zeros = Stored(grid, (torch.float32, torch.int8, torch.int32, torch.int64), optional=True, flat=True)
        return {"_weight_qdata": data, "_weight_scale": Stored(grid, flat=True), "_weight_zero_point": zeros}

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        data, grid = tensors["_weight_qdata"], Grid(self.grid_outputs, self.grid_inputs)
        zeros = tensors.get("_weight_zero_point")
        return Coded(
            data,
            grid.group(data.shape[1]),
            grid.by_row(tensors["_weight_scale"], len(data)),
            None if zeros is None else grid.by_row(zeros, len(data)),
        )
