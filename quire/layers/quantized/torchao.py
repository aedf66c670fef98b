# SPDX-License-Identifier: Apache-2.0
"""Tensor classes of torchao in safetensors: each of their parts is a tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.linear import WeightScheme
from quire.layers.quantized.codec import Codec, Coded, Grid, Stored, every, inputs, outputs, scheme_of
from quire.layers.quantized.integers import unpacked, with_sign

_MIDDLE = 8
"""4-bit integer that represents the zero point, which is a float."""
_TILE_OUTPUTS, _TILE_INPUTS, _TILES = 8, 16, 8
"""Outputs and inputs of a tensor-core tile, and tiles in a row whose values for a lane are adjacent (two per word)."""
_FILLED = 1024
"""Multiple of inputs that tiles are padded to."""


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


@dataclass(frozen=True)
class TorchAoInt4(Codec):
    """4-bit weights q * scale + zero with q from -8 to 7, two per byte, the first in the low half.

    qdata int8 or uint8 [N, K / 2]; scale and zero_point, floats, [G, N].
    """

    group_size: int = 128

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of("int4", self.group_size, shifted=True)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        by_group = Stored((inputs(self.group_size), outputs()))
        return {
            "_weight_qdata": Stored((outputs(), inputs(2)), (torch.int8, torch.uint8)),
            "_weight_scale": by_group,
            "_weight_zero_point": by_group,
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        pairs = tensors["_weight_qdata"].view(torch.uint8)
        codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2) ^ _MIDDLE
        return _around(
            self.group_size, codes, tensors["_weight_scale"].t(), tensors["_weight_zero_point"].t()
        )


@dataclass(frozen=True)
class TorchAoInt4Tiles(Codec):
    """`TorchAoInt4` with codes from 0 to 15, less 8, in tinygemm's order: tiles of 8 outputs and 16 inputs.

    qdata int32 [N / 8, K / 128, 32, 4]: lane t of 32 has output t / 4. For each pair of tiles its low nibbles have
    input 2 (t % 4), the input 8 later, and these of the other tile; its high nibbles have the input after each.
    scale_and_zero is [G, N, 2]. K is padded to a multiple of 1024.
    """

    group_size: int = 128

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of("int4", self.group_size, shifted=True)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        blocks = inputs(_FILLED, _FILLED // (_TILES * _TILE_INPUTS), filled=True)
        groups = inputs(_FILLED, _FILLED // self.group_size, filled=True)
        tiles, rows = outputs(_TILE_OUTPUTS), outputs(_TILE_OUTPUTS, _TILE_OUTPUTS, filled=True)
        return {
            "_weight_qdata": Stored((tiles, blocks, every(32), every(4)), (torch.int32,)),
            "_weight_scale_and_zero": Stored((groups, rows, every(2))),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        words = tensors["_weight_qdata"]
        tiles, blocks = words.shape[:2]
        # [tile, block, output, place, pair, nibble]; a nibble is (odd, tile, half).
        lanes = unpacked(words.unsqueeze(-1), 4, -1).view(tiles, blocks, 8, 4, 4, 2, 2, 2)
        codes = lanes.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(tiles * _TILE_OUTPUTS, -1)
        scales, zeros = tensors["_weight_scale_and_zero"].unbind(-1)
        return _around(self.group_size, codes, scales.t(), zeros.t())


def _around(group: int, codes: Tensor, scales: Tensor, zeros: Tensor) -> Coded:
    """Return codes for (code - 8) * scale + zero."""
    return Coded.of("int4", group, codes, scales, _MIDDLE * scales.float() - zeros.float())
