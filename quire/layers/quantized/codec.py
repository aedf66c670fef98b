"""What a checkpoint has instead of a matrix of floats: its tensors, how they are cut, and what they stand for.

Invariant: a codec knows one module's matrix [N, K] and no layer; `Encoded` cuts by the axes that are stated here and by
nothing else, so whole layers, merged ones and shares of ranks are all read by the same few lines.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from quire.kernels.formats.scaling import BlockScales
from quire.layers.slot import FLOATS


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of a tensor: `per` indices for every `unit` outputs or inputs, the last of which may be begun.

    One that goes along neither has `per` indices, which every rank reads; 0: as many as the file has.
    """

    along: Literal["outputs", "inputs", "neither"]
    unit: int = 1
    per: int = 1

    def size(self, outputs: int, inputs: int) -> int:
        """Indices in the file."""
        count = {"outputs": outputs, "inputs": inputs, "neither": 1}[self.along]
        return -(-count * self.per // self.unit)

    def indices(self, side: slice) -> slice:
        """Those of some outputs or inputs, which begin at a whole unit."""
        return slice(side.start // self.unit * self.per, -(-side.stop * self.per // self.unit))


def outputs(unit: int = 1, per: int = 1) -> Axis:
    return Axis("outputs", unit, per)


def inputs(unit: int = 1, per: int = 1) -> Axis:
    return Axis("inputs", unit, per)


def every(count: int = 1) -> Axis:
    return Axis("neither", per=count)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a module. Its parameter has the first of `dtypes`; the file may have any of them.

    An `optional` one may be missing. Of a `flat` one, and of a single number, the file may give any shape.
    """

    axes: tuple[Axis, ...]
    dtypes: Collection[torch.dtype] = (torch.float32, *FLOATS)
    optional: bool = False
    flat: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.dtypes))

    def as_long_as(self, shape: tuple[int, ...] | None) -> Stored:
        """The same with the length that the file has, where that is what it says."""
        if self.axes != (every(0),):
            return self
        return replace(self, axes=(every(shape[0] if shape else 1),))


@dataclass(frozen=True, slots=True)
class Grid:
    """Over how many outputs and inputs a scale goes; 0: over all."""

    outputs: int = 1
    inputs: int = 0

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Of a tensor of scales."""
        return outputs(self.outputs) if self.outputs else every(), inputs(
            self.inputs
        ) if self.inputs else every()

    def by_row(self, scales: Tensor, num_rows: int) -> Tensor:
        """A row of scales for each output: [N, G]."""
        if self.outputs == 0:
            return scales.expand(num_rows, -1)
        return scales if self.outputs == 1 else scales.repeat_interleave(self.outputs, 0)[:num_rows]

    def group(self, num_inputs: int) -> int:
        """Inputs that share a scale."""
        return self.inputs or num_inputs


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix [N, K] as `(data - zeros) * scales - minimums`.

    `data` is [N, K] of any dtype, the others [N, G] or None; `group` values of k share one of G, the last perhaps
    fewer.
    """

    data: Tensor
    group: int
    scales: Tensor | BlockScales
    zeros: Tensor | None = None
    minimums: Tensor | BlockScales | None = None

    def widened(self) -> Tensor:
        """float32 [N, K]."""
        values = self.data.float()
        if self.zeros is not None:
            values = values - self._spread(self.zeros)
        values = values * self._spread(self.scales)
        return values if self.minimums is None else values - self._spread(self.minimums)

    def _spread(self, of_groups: Tensor | BlockScales) -> Tensor:
        """[N, G] -> [N, K], or [N, 1]."""
        wide = of_groups.float()
        if wide.shape[1] == 1:
            return wide
        return wide.repeat_interleave(self.group, 1)[:, : self.data.shape[1]]


class Codec:
    """Base of all codecs; the fields of one are the options of an `Encoding`."""

    cuts: ClassVar[bool] = True
    """Whether a part of the tensors stands for a part of the matrix; else all is read, and cut when it is decoded."""

    @property
    def input_unit(self) -> int:
        """Inputs that no cut splits."""
        axes = (axis for stored in self.tensors(1, 1).values() for axis in stored.axes)
        return math.lcm(*(axis.unit for axis in axes if axis.along == "inputs"))

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        """What it reads of a module's matrix [N, K], by the names behind the module's."""
        raise NotImplementedError

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        """What the tensors, of which those are missing that may be, stand for; or its floats [N, K].

        Raises:
            ValueError: they contradict each other, or what the config says; the message names the tensor.
        """
        raise NotImplementedError
