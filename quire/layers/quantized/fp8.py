# SPDX-License-Identifier: Apache-2.0
"""E4M3 (P. Micikevicius et al., "FP8 formats for deep learning", 2022) with scales for blocks of the weight."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.linear import WeightScheme
from quire.layers.quantized.codec import Codec, Coded, Grid, Stored, inputs, outputs, scheme_of


@dataclass(frozen=True)
class Fp8Codec(Codec):
    """weight float8_e4m3fn [N, K], with scales on a grid: for the whole weight, per output, or per block."""

    grid_outputs: int = 0
    grid_inputs: int = 0
    scale: str = "weight_scale"
    """Name of the scales; weights are multiplied by them, whatever the name says."""
    transposed: bool = False
    """True if weight is [K, N]."""

    @property
    def _grid(self) -> Grid:
        return Grid(self.grid_outputs, self.grid_inputs)

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of("fp8", self.grid_inputs)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        axes = outputs(), inputs()
        return {
            "weight": Stored(axes[::-1] if self.transposed else axes, (torch.float8_e4m3fn,)),
            self.scale: Stored(self._grid.axes, flat=True),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        data, grid = tensors["weight"].t() if self.transposed else tensors["weight"], self._grid
        return Coded.of("fp8", grid.inputs, data, grid.by_row(tensors[self.scale], len(data)))
