"""What DoRA divides a layer's outputs by: the lengths of the rows of weight and product (S. Liu et al., 2024).

A rank that has some inputs of each row knows a part of its sum of squares, and a reader in the background asks no other
rank for theirs. They are added up when the adapter first comes into a slot, which is in the same step on all ranks.
Those of slices are added as what slices make is, so that lengths have the same bits however many ranks there are.

Shapes: N outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.kernels import ops
from quire.kernels.lora import LoraStacks
from quire.kernels.reference_collectives import tree_sum

_LEAST = 1e-12
"""Taken for the length of a row of zeros, whose outputs stay 0."""


class RowLengths:
    """Those of one layer, as far as this rank knows them; `group` knows the rest, None: there is none.

    `lengthen` lets an adapter's stacks multiply rows of weight and product by factors [N].

    Layers that are slices of one have the same `whole`, its name; "": a layer is none.
    """

    def __init__(
        self,
        num_outputs: int,
        lengthen: Callable[[LoraStacks, Tensor], None],
        group: Group | None,
        whole: str = "",
    ) -> None:
        self._lengthen = lengthen
        self.group = group
        self.whole = whole
        self.squares = torch.zeros(num_outputs)
        self._magnitudes = torch.zeros(num_outputs)
        self._bias = torch.zeros(num_outputs)
        self._is_here = torch.zeros(num_outputs, dtype=torch.bool)

    def add(self, here: slice, columns: Iterable[Tensor], magnitudes: Tensor, bias: Tensor | float) -> None:
        """Some outputs have these columns, of weight and product, get these lengths, and add the layer's bias."""
        self.squares[here] = sum(part.square().sum(1) for part in columns)
        self._magnitudes[here], self._bias[here] = magnitudes, bias
        self._is_here[here] = True

    def apply(self, squares: Tensor, stacks: LoraStacks) -> None:
        """Let an adapter's stacks, of a single slot, multiply outputs; squares [N] are those of all inputs."""
        lengths = squares.sqrt().clamp(min=_LEAST)
        factors = torch.where(self._is_here, self._magnitudes / lengths, 1.0)
        self._lengthen(stacks, factors)
        if self._bias.any():
            stacks.offsets[0] += (1 - factors) * self._bias


def settle(lengths: Mapping[int, RowLengths], layers: Mapping[int, LoraStacks]) -> None:
    """Apply an adapter's, by the indices of layers, in which the same ranks share inputs: one sum over them for all."""
    if not lengths:
        return
    wholes: dict[str | int, list[int]] = {}
    for index, own in lengths.items():
        wholes.setdefault(own.whole or index, []).append(index)
    squares = [tree_sum([lengths[index].squares for index in of]) for of in wholes.values()]
    group, known = next(iter(lengths.values())).group, torch.cat(squares)
    sums = known if group is None else ops.all_reduce(known, group)
    for of, whole in zip(wholes.values(), torch.split(sums, [*map(len, squares)]), strict=True):
        for index in of:
            lengths[index].apply(whole, layers[index])
