# SPDX-License-Identifier: Apache-2.0
"""Integers with a scale per output, group of inputs or weight, as compressed-tensors writes them.

Packed integers lie in larger ones, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.integers import INT4_ZERO
from quire.kernels.linear import INT8_ZERO, WeightScheme
from quire.layers.quantized.codec import Codec, Coded, Grid, Stored, every, inputs, outputs, scheme_of


def words_of(bits: int) -> tuple[int, int]:
    """Return the fewest integers of `bits` bits that fill whole 32-bit words, and the number of these words."""
    return (32, bits) if 32 % bits else (32 // bits, 1)


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 or uint8 words into uint8: a word holds several integers, or several words hold a run of 32.

    Where a word is not a whole number of integers, as with 3 bits, they are one stream of bits, split into words.
    """
    width = words.element_size() * 8
    along = words.movedim(dim, -1)
    if width % bits == 0:
        shifts = torch.arange(0, width, bits, dtype=torch.int32, device=words.device)
        numbers = (along.unsqueeze(-1).int() >> shifts) & ((1 << bits) - 1)
    else:
        numbers = _stream(along, bits, width)
    return numbers.flatten(-2).to(torch.uint8).movedim(-1, dim)


def _stream(words: Tensor, bits: int, width: int) -> Tensor:
    """Unpack [..., W] into [..., W / bits, width]: each integer begins in one word and may end in the next."""
    whole = F.pad(words, (0, -words.shape[-1] % bits))
    runs = torch.unflatten(whole, -1, (-1, bits)).long() & ((1 << width) - 1)
    first = torch.arange(width, device=words.device) * bits
    word, shift = first // width, first % width
    following = torch.cat([runs, torch.zeros_like(runs[..., :1])], -1)[..., word + 1]
    pairs = runs[..., word] | following << width
    return (pairs >> shift) & ((1 << bits) - 1)


@dataclass(frozen=True)
class Int8Codec(Codec):
    """weight int8 [N, K], weight_scale on a grid, and perhaps weight_zero_point int8 on the same grid."""

    grid_outputs: int = 1
    grid_inputs: int = 0

    @property
    def _grid(self) -> Grid:
        return Grid(self.grid_outputs, self.grid_inputs)

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of("int8", self.grid_inputs, shifted="weight_zero_point" in present)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        return {
            "weight": Stored((outputs(), inputs()), (torch.int8,)),
            "weight_scale": Stored(self._grid.axes, flat=True),
            "weight_zero_point": Stored(self._grid.axes, (torch.int8,), optional=True, flat=True),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        return with_sign(
            self._grid, tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point")
        )


@dataclass(frozen=True)
class PackedIntegers(Codec):
    """Integers of `bits` bits, offset by half their range; a word holds those of neighboring inputs.

    weight_packed int32 [N, K * bits / 32]; weight_scale [N, G]; weight_zero_point int32 [N * bits / 32, G], with the
    same offset, unless `symmetric`; weight_g_idx int32 [K], the group of each input, if `reordered`.
    """

    bits: int = 4
    group_size: int = 0
    """0: one group of all inputs."""
    symmetric: bool = True
    reordered: bool = False
    groups_in = "weight_g_idx"

    @property
    def reorders(self) -> bool:
        return self.reordered

    def by_groups(self, groups: Tensor) -> Codec:
        return replace(self, reordered=not in_turn(groups, self.group_size))

    def order(self, groups: Tensor) -> Tensor | None:
        return by_group(groups, self.group_size)

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of(kind_of(self.bits), self.group_size, shifted=not self.symmetric)

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
        zeros = None if self.symmetric else unpacked(tensors["weight_zero_point"], self.bits, 0)[: len(data)]
        if not self.reordered:
            return unsigned(self.bits, self.group_size, data, scales, zeros)
        groups = group_indices("weight_g_idx", tensors["weight_g_idx"], scales.shape[1])
        return reordered(self.bits, self.group_size, groups, data[:, : len(groups)], scales, zeros)


def kind_of(bits: int) -> str:
    """Return the format that holds integers of `bits` bits."""
    return "int8" if bits > 4 else "int4"


def unsigned(bits: int, group: int, data: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Coded:
    """Return codes for unsigned integers, uint8, with these zero points, or else one in the middle of their range."""
    if zeros is not None:
        return Coded.of(kind_of(bits), group, data, scales, zeros)
    middle, half = (INT8_ZERO, 1 << (bits - 1)) if bits > 4 else (INT4_ZERO, 1 << (bits - 1))
    centered = data + (middle - half)
    return Coded.of(
        kind_of(bits), group, (centered ^ INT8_ZERO).view(torch.int8) if bits > 4 else centered, scales
    )


def reordered(
    bits: int, group: int, groups: Tensor, data: Tensor, scales: Tensor, zeros: Tensor | None
) -> Coded:
    """Return `unsigned` codes of inputs in these groups: sorted by group, or else with a scale for each input."""
    order = by_group(groups, group)
    if order is None or len(torch.unique(groups)) != scales.shape[1]:
        return unsigned(bits, 1, data, scales[:, groups], None if zeros is None else zeros[:, groups])
    return replace(unsigned(bits, group, data[:, order], scales, zeros), order=order)


def by_group(groups: Tensor, size: int) -> Tensor | None:
    """Return the inputs sorted by group, int64 [K]; None if a group but the last is not of `size` (0: all)."""
    order = torch.argsort(groups, stable=True)
    return order if in_turn(groups[order], size) else None


def in_turn(groups: Tensor, size: int) -> bool:
    """Return whether the first `size` inputs (0: all) are in the first group, the next in the second, and so on."""
    return torch.equal(
        groups.long(), torch.arange(len(groups), device=groups.device) // (size or len(groups))
    )


def with_sign(grid: Grid, data: Tensor, scales: Tensor, zeros: Tensor | None) -> Coded:
    """Return codes for int8 with scales, and perhaps int8 zero points, on a grid."""
    by_row = grid.by_row(scales, len(data))
    if zeros is None:
        return Coded.of("int8", grid.inputs, data, by_row)
    lifted = (grid.by_row(zeros, len(data)).to(torch.int16) + INT8_ZERO).to(torch.uint8)
    return Coded.of("int8", grid.inputs, data.view(torch.uint8) ^ INT8_ZERO, by_row, lifted)


def group_indices(name: str, tensor: Tensor, count: int) -> Tensor:
    """Return the group of each input, int64.

    Raises:
        ValueError: a group is not in 0 .. `count` - 1.
    """
    groups = tensor.long()
    for wrong in groups[(groups < 0) | (groups >= count)][:1].tolist():
        raise ValueError(f"{name} names group {wrong}; there are {count}")
    return groups
