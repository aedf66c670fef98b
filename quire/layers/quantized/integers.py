"""Integers with a scale for each output, group of inputs or matrix, as compressed-tensors writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.quantized.bits import unpacked, words_of
from quire.layers.quantized.codec import Codec, Coded, Grid, Stored, every, inputs, outputs


@dataclass(frozen=True)
class Int8(Codec):
    """weight int8 [N, K], weight_scale on a grid, and perhaps weight_zero_point int8 on the same."""

    grid_outputs: int = 1
    grid_inputs: int = 0

    @property
    def _grid(self) -> Grid:
        return Grid(self.grid_outputs, self.grid_inputs)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        return {
            "weight": Stored((outputs(), inputs()), (torch.int8,)),
            "weight_scale": Stored(self._grid.axes, flat=True),
            "weight_zero_point": Stored(self._grid.axes, (torch.int8,), optional=True, flat=True),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        data, grid = tensors["weight"], self._grid
        zeros = tensors.get("weight_zero_point")
        return Coded(
            data,
            grid.group(data.shape[1]),
            grid.by_row(tensors["weight_scale"], len(data)),
            None if zeros is None else grid.by_row(zeros, len(data)),
        )


@dataclass(frozen=True)
class PackedIntegers(Codec):
    """Integers of some bits, larger by half their range, of which words hold those of neighbouring inputs.

    weight_packed int32 [N, K * bits / 32]; weight_scale [N, G]; weight_zero_point int32 [N * bits / 32, G], larger by
    as much, unless `symmetric`; weight_g_idx int32 [K], the group of each input, if they are in another order.
    """

    bits: int = 4
    group_size: int = 0
    """0: one group of all inputs."""
    symmetric: bool = True
    reordered: bool = False

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        run, words = words_of(self.bits)
        _, groups = Grid(1, self.group_size).axes
        if self.reordered:
            groups = every(-(-num_inputs // self.group_size))
        tensors = {
            "weight_packed": Stored((outputs(), inputs(run, words)), (torch.int32,)),
            "weight_scale": Stored((outputs(), groups)),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = Stored((outputs(run, words), groups), (torch.int32,))
        if self.reordered:
            tensors["weight_g_idx"] = Stored((inputs(),), (torch.int32,))
        return tensors

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        data, scales = unpacked(tensors["weight_packed"], self.bits, 1), tensors["weight_scale"]
        if self.symmetric:
            zeros = torch.full_like(scales, 1 << (self.bits - 1))
        else:
            zeros = unpacked(tensors["weight_zero_point"], self.bits, 0)[: len(data)]
        if self.reordered:
            data = data[:, : len(tensors["weight_g_idx"])]
            groups = group_indices("weight_g_idx", tensors["weight_g_idx"], scales.shape[1])
            return Coded(data, 1, scales[:, groups], zeros[:, groups])
        return Coded(data, self.group_size or data.shape[1], scales, zeros)


def group_indices(name: str, tensor: Tensor, count: int) -> Tensor:
    """The group of each input, int64.

    Raises:
        ValueError: it is none of so many groups.
    """
    groups = tensor.long()
    for wrong in groups[(groups < 0) | (groups >= count)][:1].tolist():
        raise ValueError(f"{name} names group {wrong}; there are {count}")
    return groups
