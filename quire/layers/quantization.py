# SPDX-License-Identifier: Apache-2.0
"""Quantization methods: how a layer's weight is read from the checkpoint and stored, one object each, in one table.

Invariant: methods are known by name only here. A layer asks its method for parameters, their slots and the finish; the
loader assigns each layer its method; kernels know packed formats (`WeightScheme`) and no method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from quire.errors import ConfigError, ModelLoadError
from quire.kernels import ops, reference
from quire.kernels.formats.base import BLOCK
from quire.kernels.formats.two_level import narrowed
from quire.kernels.linear import CHUNK, FLOAT, PackedWeight, WeightScheme
from quire.layers.base import parameter
from quire.layers.shard import WHOLE
from quire.layers.slot import Slot, TensorPart, length

if TYPE_CHECKING:
    from quire.layers.matrix import MatrixLayer


class QuantMethod:
    """Base of all methods: one float tensor in the file, packed by `scheme` when it is loaded.

    A method for quantized checkpoints overrides parameters, slots and finish. Rows and columns of a layer are its
    rank's.
    """

    name: ClassVar[str]
    quantizes_rows: bool = False
    """True if matmuls take `QuantizedRows`."""
    spans_rows: bool = False
    """True if a scale covers all k of an output, so that a row-parallel rank must read all of them to find it."""
    values: WeightScheme | None = None
    """Scheme of the values of a QKV layer, its last rows, if it differs from that of queries and keys."""

    def __init__(self, scheme: WeightScheme = FLOAT) -> None:
        self.scheme = scheme

    @property
    def input_unit(self) -> int:
        """Number of inputs that sharding never splits."""
        return 1

    def unrounded(self) -> QuantMethod:
        """Return the unquantized variant for a layer whose weight is never rounded."""
        return method_of(replace(FLOAT, invariant=self.scheme.invariant))

    def looked_up(self) -> QuantMethod:
        """Return the float variant for a table that is only looked up and never multiplied."""
        return TABLE

    def create(self, layer: MatrixLayer) -> None:
        """Allocate a layer's parameters, uninitialized.

        Raises:
            ConfigError: the layer cannot be sharded this way.
        """
        layer.weight = parameter(layer.num_rows, length(self.read(layer)), dtype=layer.dtype)

    def slots(self, layer: MatrixLayer, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        """Yield slots for the tensors of checkpoint modules `names`; see `Layer.slots`."""
        assert layer.weight is not None, "slots are filled before the layer is finished"
        weight, columns, every_column = layer.weight, self.read(layer), slice(0, layer.inputs)
        pieces = layer.pieces(names)
        layer.sources = [(f"{piece.name}.weight", piece.place) for piece in pieces]
        adopt = layer.adopt if len(pieces) == 1 and self._reads_file(layer) else None
        for piece in pieces:
            part = TensorPart(
                (piece.num_rows, layer.inputs), (piece.region, every_column), (piece.rows, columns)
            )
            target = weight[piece.place]
            if layer.transposed:
                part, target = part.transposed(), target.t()
            yield f"{piece.name}.weight", Slot(target, "normal", part, adopt=adopt)

    def replaced(self, layer: MatrixLayer, device_type: str) -> Collection[str]:
        """Return names of the parameters that `finish` frees on this device type."""
        assert layer.weight is not None, "asked before the layer is finished"
        takes = ops.pack_weight.takes(device_type, layer.weight, self.scheme, layer.halves())
        return ("weight",) if takes else ()

    def finish(self, layer: MatrixLayer) -> None:
        """Convert the fully loaded weight into its stored form.

        Raises:
            ModelLoadError: it is quantized, and has non-finite values.
        """
        assert layer.weight is not None, "a layer is finished once"
        weight = layer.rearranged(layer.weight.data)
        if self.replaced(layer, weight.device.type):
            packed = ops.pack_weight(weight, self.scheme, layer.halves())
            _check_scales(layer, packed)
            layer.weight, layer.packed = None, self._own_columns(layer, packed)
        else:
            layer.adopt(self._rounded(layer, weight))

    def read(self, layer: MatrixLayer) -> slice:
        """Return the inputs whose weights are read, of which a rank may keep fewer."""
        return slice(0, layer.inputs) if self.spans_rows else layer.columns

    def _own_columns(self, layer: MatrixLayer, packed: PackedWeight) -> PackedWeight:
        return (
            packed if self.read(layer) == layer.columns else self._narrowed(packed, self._kept_columns(layer))
        )

    def _narrowed(self, packed: PackedWeight, inputs: slice) -> PackedWeight:
        return packed.narrowed(inputs)

    def _kept_columns(self, layer: MatrixLayer) -> slice:
        """Return the inputs that the rank keeps, counted from the first that is read."""
        first, columns = self.read(layer).start, layer.columns
        return slice(columns.start - first, columns.stop - first)

    def _rounded(self, layer: MatrixLayer, weight: Tensor) -> Tensor:
        """Return the quantized and dequantized weight, for devices without kernels for the packed form."""
        packed = ops.pack_weight(weight, self.scheme)
        _check_scales(layer, packed)
        return reference.unpack_weight(packed)[:, self._kept_columns(layer)].contiguous()

    def _reads_file(self, layer: MatrixLayer) -> bool:
        """Return whether `finish` reads the weight once and may do so in the file's own memory.

        Only on a CPU, where the file is mapped and every scheme is packed.
        """
        assert layer.weight is not None
        return not layer.transposed and layer.weight.is_cpu and bool(self.replaced(layer, "cpu"))


def _check_scales(layer: MatrixLayer, packed: PackedWeight) -> None:
    """Reject a weight with a group that has no finite scale.

    Raises:
        ModelLoadError: naming the tensor.
    """
    if packed.scales is None or not packed.scales.isnan().any():
        return
    assert layer.weight is not None, "it is let go of later"
    finite = layer.weight.data.isfinite().all(1)
    names = [name for name, rows in layer.sources if not finite[rows].all()] or [layer.name]
    raise ModelLoadError(
        f"{names[0]} holds NaN, infinity or numbers too large for {packed.scheme.kind} with a scale: name the layer in "
        '"ignore" of --quantization-config, or repair the checkpoint'
    )


class Float(QuantMethod):
    """Checkpoint floats in the model's dtype."""

    name = "float"

    def _rounded(self, layer: MatrixLayer, weight: Tensor) -> Tensor:
        return weight


class Table(Float):
    """Float table that is looked up and never multiplied: it stays in rows."""

    name = "table"

    def replaced(self, layer: MatrixLayer, device_type: str) -> Collection[str]:
        return ()


class Int8(QuantMethod):
    """8-bit quantization at load time, with a scale per output, or per output and group of inputs."""

    name = "int8"

    def __init__(self, scheme: WeightScheme = FLOAT) -> None:
        super().__init__(scheme)
        self.spans_rows = not scheme.group_size

    @property
    def input_unit(self) -> int:
        return max(CHUNK, self.scheme.group_size)


class Int4(QuantMethod):
    """4-bit quantization at load time, with a scale per output and group of inputs."""

    name = "int4"

    @property
    def input_unit(self) -> int:
        return max(CHUNK, self.scheme.group_size)

    def read(self, layer: MatrixLayer) -> slice:
        """Return the inputs that are read: in two levels whole blocks, since a step is found over all of one."""
        columns = layer.columns
        if not self.scheme.two_level:
            return columns
        stop = -(-columns.stop // BLOCK) * BLOCK
        return slice(columns.start // BLOCK * BLOCK, min(stop, layer.inputs))

    def _narrowed(self, packed: PackedWeight, inputs: slice) -> PackedWeight:
        return narrowed(packed, inputs)


class Int4FinerValues(Int4):
    """4-bit quantization of queries and keys at load time; the values of the layer are packed apart, by `values`."""

    def __init__(self, scheme: WeightScheme, values: WeightScheme) -> None:
        super().__init__(scheme)
        self.values = values

    def finish(self, layer: MatrixLayer) -> None:
        assert layer.weight is not None, "a layer is finished once"
        assert self.values is not None, "set when made"
        rows = layer.weight.data.tensor_split((layer.num_rows - layer.num_value_rows,))
        if not self.replaced(layer, layer.weight.device.type):
            others = method_of(self.values)
            layer.adopt(torch.cat([self._rounded(layer, rows[0]), others._rounded(layer, rows[1])]))
            return
        packed, values = ops.pack_weight(rows[0], self.scheme), ops.pack_weight(rows[1], self.values)
        for part in (packed, values):
            _check_scales(layer, part)
        layer.weight, layer.packed, layer.packed_values = None, packed, values


class Fp8(QuantMethod):
    """E4M3 quantization at load time, with a scale per output or one for the tensor."""

    name = "fp8"
    quantizes_rows = True
    spans_rows = True

    def create(self, layer: MatrixLayer) -> None:
        if self.scheme.per_tensor and layer.shard != WHOLE and layer.partition != "whole":
            raise ConfigError(f"{layer.name}: fp8 with one scale per tensor cannot be sharded")
        super().create(layer)


class HeldByOtherRank(QuantMethod):
    """Method of a weight that another rank holds: nothing is kept, and all its tensors are left to that rank."""

    name = "elsewhere"

    def __init__(self, method: QuantMethod) -> None:
        super().__init__(method.scheme)
        self._method = method

    def create(self, layer: MatrixLayer) -> None:
        layer.weight = None

    def slots(self, layer: MatrixLayer, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        with torch.device("meta"):
            self._method.create(layer)
        slots = [(name, slot.left()) for name, slot in self._method.slots(layer, names)]
        for name, _ in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, None)
        yield from slots

    def replaced(self, layer: MatrixLayer, device_type: str) -> Collection[str]:
        return ()

    def finish(self, layer: MatrixLayer) -> None:
        return None


METHODS: dict[str, type[QuantMethod]] = {method.name: method for method in (Float, Int8, Int4, Fp8)}
"""Methods by the kinds of their schemes: the names of `quire.config.quantization.METHODS`, and "float"."""

FLOATS = Float()
TABLE = Table()


def method_of(scheme: WeightScheme) -> QuantMethod:
    """Return the method that quantizes to `scheme` at load time."""
    return METHODS[scheme.kind](scheme)
