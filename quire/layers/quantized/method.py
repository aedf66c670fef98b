"""Fills a layer from modules that a checkpoint has quantised, whatever their encodings.

Invariant: what is read of a module is cut by the axes of its tensors, and what it stands for is kept as `kept` keeps
floats; a module that the checkpoint has in floats may stand in one layer with others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quire.errors import ConfigError, ModelLoadError
from quire.kernels import ops
from quire.kernels.cpu.huge_pages import in_matrix_memory
from quire.kernels.formats import format_of
from quire.kernels.formats.grouped import GroupedFormat
from quire.kernels.linear import Layout, PackedWeight, WeightScheme
from quire.kernels.rounding import RowRounding
from quire.layers.base import parameter
from quire.layers.quantization import TABLE, QuantMethod
from quire.layers.quantized.codec import Axis, Codec, Coded, Stored
from quire.layers.quantized.merged import merged_numbers
from quire.layers.rounded_inputs import RoundedInputs
from quire.layers.slot import Part, Slot, length

if TYPE_CHECKING:
    from quire.layers.matrix import MatrixLayer, Piece


@dataclass(frozen=True)
class EncodedModule:
    """A module of the checkpoint: its name, its codec, and its tensors that are in the files, on the meta device."""

    name: str
    codec: Codec
    in_files: Mapping[str, Tensor]
    weight_only: bool = False
    """Whether activations are not to be rounded."""
    rounding: RowRounding | None = None
    """How what it is multiplied by is rounded before; None: not by what the checkpoint says."""

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, Stored]:
        """What is there, or has to be."""
        wanted = self.codec.tensors(num_outputs, num_inputs)
        return {
            name: stored.as_in_file(self.in_files.get(name))
            for name, stored in wanted.items()
            if not stored.optional or name in self.in_files
        }

    def scheme(self, num_inputs: int) -> WeightScheme | None:
        """See `scheme_kept`."""
        return scheme_kept(self.codec, num_inputs, self.in_files.keys())


def scheme_kept(codec: Codec, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
    """See `Codec.scheme`; None as well if the format does not have such groups."""
    scheme = codec.scheme(num_inputs, present)
    if scheme is None:
        return None
    kept = format_of(scheme)
    return scheme if isinstance(kept, GroupedFormat) and scheme.group_size in kept.groups else None


@dataclass(frozen=True)
class Packed:
    """How numbers stay what they are: in a scheme, and in an order of inputs, int64 [K], if the files say one."""

    scheme: WeightScheme
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Take:
    """Rows that are read of a module's matrix, in the region that all ranks read, and where in the layer they go."""

    rows: slice
    region: slice
    places: tuple[tuple[slice, slice], ...]
    """Some of the rows, counted from the first that is read, and their place in the layer."""


@dataclass(frozen=True, slots=True)
class _Source:
    """What a layer takes of one module, whose matrix has `num_rows`; `name` is what slots call the module."""

    index: int
    module: EncodedModule
    name: str
    num_rows: int
    takes: Sequence[_Take]

    def parameter_name(self, tensor: str) -> str:
        return f"stored{self.index}_{tensor.replace('.', '_')}"

    @property
    def places(self) -> list[slice]:
        """Its rows in the layer."""
        return [place for take in self.takes for _, place in take.places if length(place)]

    def place(self, rows: Tensor, layer: Tensor) -> None:
        """Copy what was read of the module, a row for each output, to where it is in the layer."""
        start = 0
        for take in self.takes:
            for taken, place in take.places:
                layer[place] = rows[start + taken.start : start + taken.stop]
            start += length(take.rows)


class Encoded(QuantMethod):
    """Reads `modules`, which are merged in a layer in this order, and keeps the weight as `kept` keeps floats.

    With `packed`, which holds those of all of them, their numbers stay what they are.
    """

    name = "encoded"

    def __init__(
        self, modules: Sequence[EncodedModule], kept: QuantMethod, packed: Packed | None = None
    ) -> None:
        super().__init__(kept.scheme if packed is None else packed.scheme)
        self._modules = modules
        self._kept = kept
        self._packed = packed
        self.quantizes_rows = kept.quantizes_rows
        self.spans_rows = kept.spans_rows

    @property
    def input_unit(self) -> int:
        return math.lcm(self._kept.input_unit, *(module.codec.input_unit for module in self._modules))

    def read(self, layer: MatrixLayer) -> slice:
        return self._kept.read(layer)

    def unrounded(self) -> QuantMethod:
        return Encoded(self._modules, self._kept.unrounded())

    def looked_up(self) -> QuantMethod:
        return Encoded(self._modules, TABLE)

    def create(self, layer: MatrixLayer) -> None:
        reorders = self._packed is not None and self._packed.order is not None
        if reorders and length(layer.columns) < layer.inputs:
            # A rank has some inputs of any group.
            self._packed, self.scheme = None, self._kept.scheme
        layer.weight = None
        for source, name, stored in self._tensors(layer):
            _check_cut(layer, source, name, stored)
            shape = (self._length(layer, source, axis) for axis in stored.axes)
            setattr(layer, source.parameter_name(name), parameter(*shape, dtype=stored.dtype))
        if any(module.rounding is not None for module in self._modules):
            places = [(source.module.rounding, source.places) for source in self._sources(layer)]
            layer.rounded_inputs = RoundedInputs.of(places, layer.columns, layer.inputs, layer.name)

    def slots(self, layer: MatrixLayer, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for source, name, stored in self._tensors(layer, names):
            for slot in self._slots_of(layer, source, name, stored):
                yield f"{source.name}.{name}", slot

    def replaced(self, layer: MatrixLayer, device_type: str) -> Collection[str]:
        return [source.parameter_name(name) for source, name, _ in self._tensors(layer)]

    def finish(self, layer: MatrixLayer) -> None:
        device = getattr(layer, next(iter(self.replaced(layer, "cpu")))).device
        decoded = [(source, self._decoded(layer, source)) for source in self._sources(layer)]
        if self._packed is not None and self._is_packed(layer, device):
            modules = [(source.place, _coded(each)) for source, each in decoded]
            numbers = merged_numbers(layer.num_rows, modules, self.scheme)
            layout: Layout = "panels" if device.type == "cpu" else "rows"
            packed = format_of(self.scheme).from_numbers(numbers, self.scheme, layer.halves(), layout)
            layer.packed = _in_panels(layer, packed) if layout == "panels" else packed
            order = self._packed.order
            if order is not None and not torch.equal(order, torch.arange(len(order))):
                layer.input_order = nn.Parameter(order.to(device), requires_grad=False)
            return
        weight = torch.empty(layer.num_rows, length(self.read(layer)), dtype=layer.dtype, device=device)
        for source, each in decoded:
            source.place(each.widened() if isinstance(each, Coded) else each, weight)
        layer.adopt(weight)
        self._kept.finish(layer)

    def _is_packed(self, layer: MatrixLayer, device: torch.device) -> bool:
        """Whether a kernel of the device multiplies by it; its reference would take the panels apart in each call."""
        weight = torch.empty(0, dtype=layer.dtype, device=device)
        return ops.pack_weight.takes(device.type, weight, self.scheme, layer.halves())

    def _decoded(self, layer: MatrixLayer, source: _Source) -> Coded | Tensor:
        """What is read of a module: rows and inputs."""
        tensors = {}
        for name in source.module.tensors(source.num_rows, layer.inputs):
            tensors[name] = getattr(layer, source.parameter_name(name)).data
            delattr(layer, source.parameter_name(name))
        codec, expected = source.module.codec, (source.num_rows, layer.inputs)
        try:
            decoded = codec.decoded(tensors)
        except ValueError as error:
            raise ModelLoadError(f"{source.module.name}: {error}") from error
        shape = tuple((decoded.numbers.data if isinstance(decoded, Coded) else decoded).shape)
        if not codec.cuts and shape != expected:
            raise ModelLoadError(
                f"{source.module.name}: the tensors are of a matrix {[*shape]}, config.json implies {[*expected]}"
            )
        read = self.read(layer) if not codec.cuts else slice(0, length(self.read(layer)))
        return decoded.narrowed(read) if isinstance(decoded, Coded) else decoded[:, read]

    def _slots_of(self, layer: MatrixLayer, source: _Source, name: str, stored: Stored) -> Iterator[Slot]:
        shape = tuple(axis.size(source.num_rows, layer.inputs) for axis in stored.axes)
        in_file = tuple(source.module.in_files[name].shape) if name in source.module.in_files else shape
        is_same = math.prod(in_file) == math.prod(shape) and (stored.flat or math.prod(shape) == 1)
        target, start = getattr(layer, source.parameter_name(name)), 0
        dim = next((dim for dim, axis in enumerate(stored.axes) if axis.along == "outputs"), None)
        for take in source.takes if dim is not None else source.takes[:1]:
            box = tuple(self._indices(layer, axis, take.rows) for axis in stored.axes)
            region = [slice(0, size) for size in shape]
            place = target
            if dim is not None:
                region[dim] = stored.axes[dim].indices(take.region)
                place = target.narrow(dim, start, length(box[dim]))
                start += length(box[dim])
            part = Part(shape, tuple(region), box, in_file if is_same else None)
            # What stands for all outputs is read by every layer that takes some of them.
            yield Slot(place, "zeros", part, stored.dtypes, shared=dim is None)

    def _indices(self, layer: MatrixLayer, axis: Axis, rows: slice) -> slice:
        """What is read along an axis."""
        sides = {"outputs": rows, "inputs": self.read(layer), "neither": slice(0, 1)}
        return axis.indices(sides[axis.along])

    def _length(self, layer: MatrixLayer, source: _Source, axis: Axis) -> int:
        takes = source.takes if axis.along == "outputs" else source.takes[:1]
        return sum(length(self._indices(layer, axis, take.rows)) for take in takes)

    def _tensors(
        self, layer: MatrixLayer, names: Sequence[str] = ()
    ) -> Iterator[tuple[_Source, str, Stored]]:
        for source in self._sources(layer, names):
            for name, stored in source.module.tensors(source.num_rows, layer.inputs).items():
                yield source, name, stored

    def _sources(self, layer: MatrixLayer, names: Sequence[str] = ()) -> Iterator[_Source]:
        """The modules with what the layer takes of each; `names` are what slots call them, if it is something else."""
        pieces: dict[str, list[Piece]] = {}
        for piece in layer.pieces(names or [module.name for module in self._modules]):
            pieces.setdefault(piece.name, []).append(piece)
        modules = {
            module.name: module for module in self._modules
        }  # one may stand for several parts of a layer
        for index, (module, (name, parts)) in enumerate(zip(modules.values(), pieces.items(), strict=True)):
            yield _Source(index, module, name, parts[0].num_rows, _takes(parts, module.codec.cuts))


def _in_panels(layer: MatrixLayer, packed: PackedWeight) -> PackedWeight:
    """As a CPU's kernels have it, with what they need where activations have zero points."""
    shifts = layer.rounded_inputs is not None and layer.rounded_inputs.shifts
    summed = packed.with_code_sums() if shifts and packed.scheme.is_plain_int8 else packed
    return summed.moved(in_matrix_memory)


def _coded(decoded: Coded | Tensor) -> Coded:
    assert isinstance(decoded, Coded), "a codec that states a scheme decodes to it"
    return decoded


def _takes(pieces: Sequence[Piece], cuts: bool) -> list[_Take]:
    """All of a module in one go where nothing is left to others, or nothing can be, else piece by piece."""
    num_rows = pieces[0].num_rows
    if not cuts or sum(length(piece.rows) for piece in pieces) == num_rows:
        whole = slice(0, num_rows)
        return [_Take(whole, whole, tuple((piece.rows, piece.place) for piece in pieces))]
    return [
        _Take(piece.rows, piece.region, ((slice(0, length(piece.rows)), piece.place),)) for piece in pieces
    ]


def _check_cut(layer: MatrixLayer, source: _Source, name: str, stored: Stored) -> None:
    """Raises ConfigError: rows that are cut apart share an index of a tensor."""
    ends = {
        end for take in source.takes for side in (take.rows, take.region) for end in (side.start, side.stop)
    }
    for axis in stored.axes:
        if axis.along == "outputs" and any(end % axis.unit for end in ends - {source.num_rows}):
            raise ConfigError(
                f"{layer.name}: {source.name}.{name} keeps {axis.unit} outputs together, which cannot be cut apart"
            )
