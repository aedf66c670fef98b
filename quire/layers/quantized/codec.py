# SPDX-License-Identifier: Apache-2.0
"""Codecs of quantized weights: tensors in the checkpoint, their sharding, and their decoding; and the table of codecs.

Invariant: a codec handles one module's weight [N, K] and no layer. `Encoded` slices only by the axes stated here, so
the same few lines read whole layers, merged layers and ranks' shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from quire.config.encoding import Encoding
from quire.kernels.formats import BlockScales, Numbers, format_of
from quire.kernels.formats.grouped import GroupedFormat
from quire.kernels.linear import WeightScheme
from quire.layers.slot import FLOATS
from quire.plugins import PluginTable, subclass_of


@dataclass(frozen=True, slots=True)
class Axis:
    """Dimension of a tensor: `per` indices for every `unit` outputs or inputs; the last unit may be partial.

    If `filled`, the last unit has all of its indices. An axis along neither has `per` indices, which every rank reads;
    0: as many as the file has.
    """

    along: Literal["outputs", "inputs", "neither"]
    unit: int = 1
    per: int = 1
    filled: bool = False

    def size(self, outputs: int, inputs: int) -> int:
        """Return the number of indices in the file."""
        return self._end({"outputs": outputs, "inputs": inputs, "neither": 1}[self.along])

    def indices(self, side: slice) -> slice:
        """Return the indices of some outputs or inputs, which begin at a whole unit."""
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
    """Tensor of a module. The file may have any of `dtypes`, and the parameter has the first.

    An `optional` tensor may be missing. The file may give a `flat` tensor, or a single number, any shape.
    """

    axes: tuple[Axis, ...]
    dtypes: Collection[torch.dtype] = (torch.float32, *FLOATS)
    optional: bool = False
    flat: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.dtypes))

    def as_in_file(self, tensor: Tensor | None) -> Stored:
        """Return this with the file's dtype, if it is one of `dtypes`, and its length, if the axis leaves it open."""
        dtypes = [tensor.dtype] if tensor is not None and tensor.dtype in self.dtypes else []
        length = every(tensor.shape[0] if tensor is not None and tensor.dim() else 1)
        axes = (length,) if self.axes == (every(0),) else self.axes
        return replace(self, axes=axes, dtypes=(*dtypes, *self.dtypes))


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers of outputs and inputs that share a scale; 0: all."""

    outputs: int = 1
    inputs: int = 0

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Axes of a tensor of scales."""
        return outputs(self.outputs) if self.outputs else every(), inputs(
            self.inputs
        ) if self.inputs else every()

    def by_row(self, scales: Tensor, num_rows: int) -> Tensor:
        """Return a row of scales for each output: [N, G]."""
        if self.outputs == 0:
            return scales.expand(num_rows, -1)
        return scales if self.outputs == 1 else scales.repeat_interleave(self.outputs, 0)[:num_rows]


@dataclass(frozen=True, slots=True)
class Coded:
    """Weight [N, K] as numbers of a packed format; `scheme.group_size` values of k share a scale, 0: all.

    With an `order`, int64 [K], column j is input order[j].
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
        """Return codes as in `Numbers`; the format need not support the group size."""
        return Coded(scheme_of(kind, group, shifted=zeros is not None), Numbers(data, scales, zeros))

    def widened(self) -> Tensor:
        """Dequantize to float32 [N, K]."""
        kept, data = format_of(self.scheme), self.numbers.data
        assert isinstance(kept, GroupedFormat), "floats are no codes"
        scales, zeros = (
            each.float() if isinstance(each, BlockScales) else each
            for each in (self.numbers.scales, self.numbers.zeros)
        )
        columns = kept.widened(kept.codes(data), self.scheme, scales, zeros)[:, : data.shape[1]]
        return columns if self.order is None else columns[:, self.order.argsort()]

    def narrowed(self, inputs: slice) -> Coded:
        """Return the part of some inputs, which begin at a whole group."""
        group = self.scheme.group_size
        groups = slice(inputs.start // group, -(-inputs.stop // group)) if group else slice(None)
        data, *streams = self.numbers
        if inputs == slice(0, data.shape[1]):
            return self
        assert self.order is None, "what is in another order is read whole, or cut as it is read"
        cut = (each[:, groups] if isinstance(each, Tensor) else each for each in streams)
        return Coded(self.scheme, Numbers(data[:, inputs], *cut))


def scheme_of(kind: str, group: int, *, shifted: bool = False) -> WeightScheme:
    """Return the scheme of a format's codes; `shifted` by zero points or minimums."""
    return WeightScheme(kind, group_size=group, symmetric=not shifted)


class Codec:
    """Base class of all codecs; a codec's fields are the options of an `Encoding`."""

    cuts: ClassVar[bool] = True
    """True if a part of the tensors decodes to a part of the weight; else all is read, and sliced after decoding."""
    groups_in: ClassVar[str | None] = None
    """Name of the tensor with the group of each input, where a module has it."""

    @property
    def input_unit(self) -> int:
        """Number of inputs that no shard splits."""
        axes = (axis for stored in self.tensors(1, 1).values() for axis in stored.axes)
        return math.lcm(*(axis.unit for axis in axes if axis.along == "inputs"))

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        """Return the scheme of the decoded numbers, if kernels can use them; `present` names tensors in files."""
        return None

    @property
    def reorders(self) -> bool:
        """True if only the tensor `groups_in` defines the groups of inputs."""
        return False

    def by_groups(self, groups: Tensor) -> Codec:
        """Return the codec for a module whose tensor `groups_in` holds `groups`, whatever the config says of it."""
        return self

    def order(self, groups: Tensor) -> Tensor | None:
        """Return the inputs sorted by group, from the contents of `groups_in`; None if groups are not of one size."""
        return None

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        """Return the tensors of a module's weight [N, K], by their names after the module's."""
        raise NotImplementedError

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        """Decode the tensors, of which optional ones may be missing, to codes, or to floats [N, K].

        Raises:
            ValueError: they contradict each other, or the config; the message names the tensor.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Floats(Codec):
    """Float modules beside quantized ones: weight [N, K]."""

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        return {"weight": Stored((outputs(), inputs()))}

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        return tensors["weight"]


@dataclass(frozen=True)
class Alternate(Codec):
    """Outputs `half`, `half` + 2 and so on of the matrix that `both` decodes from all of the module's tensors."""

    both: Codec
    half: int
    cuts = False

    @property
    def input_unit(self) -> int:
        return self.both.input_unit

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return self.both.scheme(num_inputs, present)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        return self.both.tensors(2 * num_outputs, num_inputs)

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        decoded, own = self.both.decoded(tensors), slice(self.half, None, 2)
        if isinstance(decoded, Tensor):
            return decoded[own]
        data, *streams = decoded.numbers
        cut = (each[own] if isinstance(each, Tensor) else each for each in streams)
        return replace(decoded, numbers=Numbers(data[own], *cut))


_HERE = "quire.layers.quantized"

CODECS: PluginTable[type[Codec]] = PluginTable(
    "quire.codecs",
    "an encoding of a checkpoint's weights",
    {
        "floats": f"{_HERE}.codec:Floats",
        "gptq": f"{_HERE}.gptq:Gptq",
        "ggml": f"{_HERE}.ggml:Ggml",
        "awq": f"{_HERE}.gptq:Awq",
        "int8": f"{_HERE}.integers:Int8Codec",
        "packed_integers": f"{_HERE}.integers:PackedIntegers",
        "fp8": f"{_HERE}.floats:Fp8Codec",
        "mxfp4_blocks": f"{_HERE}.floats:Mxfp4Blocks",
        "mxfp4": f"{_HERE}.floats:Mxfp4",
        "nvfp4": f"{_HERE}.floats:Nvfp4",
        "bnb_int8": f"{_HERE}.bitsandbytes:BnbInt8",
        "bnb_4bit": f"{_HERE}.bitsandbytes:Bnb4",
        "hqq": f"{_HERE}.hqq:Hqq",
        "torchao": f"{_HERE}.torchao:TorchAo",
        "torchao_int4": f"{_HERE}.torchao:TorchAoInt4",
        "torchao_int4_tiles": f"{_HERE}.torchao:TorchAoInt4Tiles",
    },
    subclass_of(Codec),
)


def codec_of(encoding: Encoding) -> Codec:
    """Return the codec of an encoding.

    Raises:
        ConfigError: there is none of its kind.
    """
    kind: Any = CODECS.resolve(encoding.kind)
    codec: Codec = kind(**encoding.options)
    return codec
