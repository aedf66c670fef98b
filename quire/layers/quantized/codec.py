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

from quire.kernels.formats import BlockScales, Numbers, format_of
from quire.kernels.formats.grouped import GroupedFormat
from quire.kernels.linear import WeightScheme
from quire.layers.slot import FLOATS


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of a tensor: `per` indices for every `unit` outputs or inputs, the last of which may be begun.

    Of one that is `filled` the last has all of its indices. One that goes along neither has `per` indices, which every
    rank reads; 0: as many as the file has.
    """

    along: Literal["outputs", "inputs", "neither"]
    unit: int = 1
    per: int = 1
    filled: bool = False

    def size(self, outputs: int, inputs: int) -> int:
        """Indices in the file."""
        return self._end({"outputs": outputs, "inputs": inputs, "neither": 1}[self.along])

    def indices(self, side: slice) -> slice:
        """Those of some outputs or inputs, which begin at a whole unit."""
        return slice(side.start // self.unit * self.per, self._end(side.stop))

    def _end(self, count: int) -> int:
        return -(-count // self.unit) * self.per if self.filled else -(-count * self.per // self.unit)


def outputs(unit: int = 1, per: int = 1, *, filled: bool = False) -> Axis:
    return Axis("outputs", unit, per, filled)


def inputs(unit: int = 1, per: int = 1, *, filled: bool = False) -> Axis:
    return Axis("inputs", unit, per, filled)


def every(count: int = 1) -> Axis:
    return Axis("neither", per=count)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a module. The file may have any of `dtypes`, and the parameter has the first.

    An `optional` one may be missing. Of a `flat` one, and of a single number, the file may give any shape.
    """

    axes: tuple[Axis, ...]
    dtypes: Collection[torch.dtype] = (torch.float32, *FLOATS)
    optional: bool = False
    flat: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.dtypes))

    def as_in_file(self, tensor: Tensor | None) -> Stored:
        """The same in the dtype of the file, if it is one of these, and with its length, where that is what it says."""
        dtypes = [tensor.dtype] if tensor is not None and tensor.dtype in self.dtypes else []
        length = every(tensor.shape[0] if tensor is not None and tensor.dim() else 1)
        axes = (length,) if self.axes == (every(0),) else self.axes
        return replace(self, axes=axes, dtypes=(*dtypes, *self.dtypes))


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


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix [N, K] as numbers of a packed format, of which `group` values of k share a scale; 0: all.

    With an `order`, int64 [K], column j is that of input order[j].
    """

    scheme: WeightScheme
    numbers: Numbers
    order: Tensor | None = None

    @staticmethod
    def of(
        kind: str,
        group: int,
        data: Tensor,
        scales: Tensor | BlockScales,
        zeros: Tensor | BlockScales | None = None,
    ) -> Coded:
        """See `Numbers`; the group may be none of the format's."""
        return Coded(scheme_of(kind, group, shifted=zeros is not None), Numbers(data, scales, zeros))

    def widened(self) -> Tensor:
        """What it stands for: float32 [N, K]."""
        kept, data = format_of(self.scheme), self.numbers.data
        assert isinstance(kept, GroupedFormat), "floats are no codes"
        scales, zeros = (
            each.float() if isinstance(each, BlockScales) else each
            for each in (self.numbers.scales, self.numbers.zeros)
        )
        columns = kept.widened(kept.codes(data), self.scheme, scales, zeros)[:, : data.shape[1]]
        return columns if self.order is None else columns[:, self.order.argsort()]

    def narrowed(self, inputs: slice) -> Coded:
        """Those of some inputs, which begin at a whole group."""
        group = self.scheme.group_size
        groups = slice(inputs.start // group, -(-inputs.stop // group)) if group else slice(None)
        data, *streams = self.numbers
        if inputs == slice(0, data.shape[1]):
            return self
        assert self.order is None, "what is in another order is read whole, or cut as it is read"
        cut = (each[:, groups] if isinstance(each, Tensor) else each for each in streams)
        return Coded(self.scheme, Numbers(data[:, inputs], *cut))


def scheme_of(kind: str, group: int, *, shifted: bool = False) -> WeightScheme:
    """That of codes of a format; `shifted` by zero points or minimums."""
    return WeightScheme(kind, group_size=group, symmetric=not shifted)


class Codec:
    """Base of all codecs; the fields of one are the options of an `Encoding`."""

    cuts: ClassVar[bool] = True
    """Whether a part of the tensors stands for a part of the matrix; else all is read, and cut when it is decoded."""
    groups_in: ClassVar[str | None] = None
    """The tensor that says in which group each input is, where a module has it."""

    @property
    def input_unit(self) -> int:
        """Inputs that no cut splits."""
        axes = (axis for stored in self.tensors(1, 1).values() for axis in stored.axes)
        return math.lcm(*(axis.unit for axis in axes if axis.along == "inputs"))

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        """Of what is decoded, if kernels can multiply by it as it is; of optional tensors some are `present`."""
        return None

    @property
    def reorders(self) -> bool:
        """Whether inputs are in groups as only the tensor `groups_in` says."""
        return False

    def by_groups(self, groups: Tensor) -> Codec:
        """The same for a module whose tensor `groups_in` holds this, whatever the config says of it."""
        return self

    def order(self, groups: Tensor) -> Tensor | None:
        """The inputs group after group, by what the tensor `groups_in` holds; None: groups are not of one size."""
        return None

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        """What it reads of a module's matrix [N, K], by the names behind the module's."""
        raise NotImplementedError

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        """What the tensors, of which those are missing that may be, stand for; or its floats [N, K].

        Raises:
            ValueError: they contradict each other, or what the config says; the message names the tensor.
        """
        raise NotImplementedError
