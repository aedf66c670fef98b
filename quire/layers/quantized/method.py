# SPDX-License-Identifier: Apache-2.0
"""Quantization method that loads a layer from a checkpoint's quantized modules, whatever their encodings.

Invariant: a module is sliced by the axes of its tensors, and the decoded weight is kept as `kept` keeps floats. One
layer may hold quantized and float modules.
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
from quire.kernels.cpu.arena import on_huge_pages
from quire.kernels.formats import format_of
from quire.kernels.formats.grouped import GroupedFormat
from quire.kernels.linear import Layout, PackedWeight, RowQuantization, WeightScheme
from quire.layers.base import parameter
from quire.layers.input_quantization import InputQuantization
from quire.layers.quantization import TABLE, QuantMethod
from quire.layers.quantized.codec import Axis, Codec, Coded, Stored
from quire.layers.quantized.merged import merged_numbers
from quire.layers.slot import Slot, TensorPart, length

if TYPE_CHECKING:
    from quire.layers.matrix import MatrixLayer, ModuleRows


@dataclass(frozen=True)
class EncodedModule:
    """Module of the checkpoint: its name, its codec, and its tensors in the files, on the meta device."""

    name: str
    codec: Codec
    in_files: Mapping[str, Tensor]
    weight_only: bool = False
    """True if activations are not to be rounded."""
    rounding: RowQuantization | None = None
    """Rounding of its activations as the checkpoint specifies; None: the checkpoint's rounding is not used."""

    def tensors(self, num_outputs: int, num_inputs: int) -> dict[str, Stored]:
        """Return the tensors that are present or required."""
        wanted = self.codec.tensors(num_outputs, num_inputs)
        return {
            name: stored.as_in_file(self.in_files.get(name))
            for name, stored in wanted.items()
            if not stored.optional or name in self.in_files
        }

    def scheme(self, num_inputs: int) -> WeightScheme | None:
        """Return the scheme of `scheme_kept`."""
        return scheme_kept(self.codec, num_inputs, self.in_files.keys())


def scheme_kept(codec: Codec, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
    """Return `Codec.scheme`, or None if the format does not support its group size."""
    scheme = codec.scheme(num_inputs, present)
    if scheme is None:
        return None
    kept = format_of(scheme)
    return scheme if isinstance(kept, GroupedFormat) and scheme.group_size in kept.groups else None


@dataclass(frozen=True)
class Packed:
    """Scheme that keeps numbers unchanged, with the order of inputs, int64 [K], if the files have one."""

    scheme: WeightScheme
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Take:
    """Rows to read of a module's weight, the region that all ranks read, and the rows' places in the layer."""

    rows: slice
    region: slice
    places: tuple[tuple[slice, slice], ...]
    """Ranges of the rows, counted from the first that is read, and their places in the layer."""


@dataclass(frozen=True, slots=True)
class _RowSource:
    """Rows that a layer reads of one module, whose weight has `num_rows`; `name` is the module's name in slots."""

    index: int
    module: EncodedModule
    name: str
    num_rows: int
    takes: Sequence[_Take]

    def parameter_name(self, tensor: str) -> str:
        return f"stored{self.index}_{tensor.replace('.', '_')}"

    @property
    def places(self) -> list[slice]:
        """Places of its rows in the layer."""
        return [place for take in self.takes for _, place in take.places if length(place)]

    def place(self, rows: Tensor, layer: Tensor) -> None:
        """Copy the rows that were read of the module, one per output, to their places in the layer."""
        start = 0
        for take in self.takes:
            for taken, place in take.places:
                layer[place] = rows[start + taken.start : start + taken.stop]
            start += length(take.rows)


class EncodedWeights(QuantMethod):
    """Method for a layer of `modules`, merged in this order; keeps the weight as `kept` keeps floats.

    With `packed`, a scheme that holds the numbers of all modules, the numbers stay unchanged.
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
        self.values = kept.values

    @property
    def input_unit(self) -> int:
        return math.lcm(self._kept.input_unit, *(module.codec.input_unit for module in self._modules))

    def read(self, layer: MatrixLayer) -> slice:
        return self._kept.read(layer)

    def unrounded(self) -> QuantMethod:
        return EncodedWeights(self._modules, self._kept.unrounded())

    def looked_up(self) -> QuantMethod:
        return EncodedWeights(self._modules, TABLE)

    def create(self, layer: MatrixLayer) -> None:
        reorders = self._packed is not None and self._packed.order is not None
        if reorders and length(layer.columns) < layer.inputs:
            # A rank's inputs are parts of arbitrary groups.
            self._packed, self.scheme = None, self._kept.scheme
        layer.weight = None
        for source, name, stored in self._tensors(layer):
            _check_cut(layer, source, name, stored)
            shape = (self._length(layer, source, axis) for axis in stored.axes)
            setattr(layer, source.parameter_name(name), parameter(*shape, dtype=stored.dtype))
        if any(module.rounding is not None for module in self._modules):
            places = [(source.module.rounding, source.places) for source in self._sources(layer)]
            layer.input_quantization = InputQuantization.of(places, layer.columns, layer.inputs, layer.name)

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
        """Return whether a kernel of the device takes it; its reference would unpack the panels in each call."""
        weight = torch.empty(0, dtype=layer.dtype, device=device)
        return ops.pack_weight.takes(device.type, weight, self.scheme, layer.halves())

    def _decoded(self, layer: MatrixLayer, source: _RowSource) -> Coded | Tensor:
        """Return a module decoded, in the rows and inputs that are read."""
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

    def _slots_of(self, layer: MatrixLayer, source: _RowSource, name: str, stored: Stored) -> Iterator[Slot]:
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
            part = TensorPart(shape, tuple(region), box, in_file if is_same else None)
            # A tensor for all outputs is read by every layer that takes some of them.
            yield Slot(place, "zeros", part, stored.dtypes, shared=dim is None)

    def _indices(self, layer: MatrixLayer, axis: Axis, rows: slice) -> slice:
        """Return the indices to read along an axis."""
        sides = {"outputs": rows, "inputs": self.read(layer), "neither": slice(0, 1)}
        return axis.indices(sides[axis.along])

    def _length(self, layer: MatrixLayer, source: _RowSource, axis: Axis) -> int:
        takes = source.takes if axis.along == "outputs" else source.takes[:1]
        return sum(length(self._indices(layer, axis, take.rows)) for take in takes)

    def _tensors(
        self, layer: MatrixLayer, names: Sequence[str] = ()
    ) -> Iterator[tuple[_RowSource, str, Stored]]:
        for source in self._sources(layer, names):
            for name, stored in source.module.tensors(source.num_rows, layer.inputs).items():
                yield source, name, stored

    def _sources(self, layer: MatrixLayer, names: Sequence[str] = ()) -> Iterator[_RowSource]:
        """Yield the modules with the rows that the layer reads; `names` are their names in slots, if they differ."""
        pieces: dict[str, list[ModuleRows]] = {}
        for piece in layer.pieces(names or [module.name for module in self._modules]):
            pieces.setdefault(piece.name, []).append(piece)
        modules = {module.name: module for module in self._modules}  # one may hold several parts of a layer
        for index, (module, (name, parts)) in enumerate(zip(modules.values(), pieces.items(), strict=True)):
            yield _RowSource(index, module, name, parts[0].num_rows, _takes(parts, module.codec.cuts))


def _in_panels(layer: MatrixLayer, packed: PackedWeight) -> PackedWeight:
    """Return the weight for a CPU's kernels, with the code sums that activations with zero points need."""
    shifts = layer.input_quantization is not None and layer.input_quantization.shifts
    summed = packed.with_code_sums() if shifts and packed.scheme.is_plain_int8 else packed
    return summed.moved(on_huge_pages)


def _coded(decoded: Coded | Tensor) -> Coded:
    assert isinstance(decoded, Coded), "a codec that states a scheme decodes to it"
    return decoded


def _takes(pieces: Sequence[ModuleRows], cuts: bool) -> list[_Take]:
    """Return one take of the whole module if all rows are needed or none can be left out, else one per piece."""
    num_rows = pieces[0].num_rows
    if not cuts or sum(length(piece.rows) for piece in pieces) == num_rows:
        whole = slice(0, num_rows)
        return [_Take(whole, whole, tuple((piece.rows, piece.place) for piece in pieces))]
    return [
        _Take(piece.rows, piece.region, ((slice(0, length(piece.rows)), piece.place),)) for piece in pieces
    ]


def _check_cut(layer: MatrixLayer, source: _RowSource, name: str, stored: Stored) -> None:
    """Raise ConfigError if rows on both sides of a cut share an index of a tensor."""
    ends = {
        end for take in source.takes for side in (take.rows, take.region) for end in (side.start, side.stop)
    }
    for axis in stored.axes:
        if axis.along == "outputs" and any(end % axis.unit for end in ends - {source.num_rows}):
            raise ConfigError(
                f"{layer.name}: {source.name}.{name} keeps {axis.unit} outputs together, which cannot be cut apart"
            )
