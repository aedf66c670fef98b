# SPDX-License-Identifier: Apache-2.0
"""Reads an adapter directory in PEFT's layout into the layers' form.

Invariant: everything in the directory matches the model and the limits, or nothing of it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels import ops
from quire.kernels.linear import FLOAT
from quire.kernels.low_rank import LowRankStacks, SlotMemory
from quire.layers.adapter_rows import AdapterTokenRows
from quire.layers.sliced_linear import Slice
from quire.layers.slot import length
from quire.lora.adaptable import Adaptable, AdaptableTurn
from quire.lora.adapted import AdaptedModule, Kind
from quire.lora.modules import adapted_modules, quantize_adapter, reading_dtype
from quire.lora.own_rows import RowNorms, apply_row_norms, count_added, read_own_rows
from quire.lora.peft_config import WEIGHTS_NAME, read_peft_config
from quire.lora.targets import OutputPlace, Targets
from quire.models.checkpoint_files import has_file
from quire.models.safetensors_file import SafetensorsFile

_COLUMNS = 16384  # columns of a weight processed at once; a table has many
_PICKLED_NAME = "adapter_model.bin"
_BLOCK_BYTES = 4 << 20  # allocation size; allocating per layer would take as long as filling


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter on the host: stacks with a single slot, by index of each layer that it changes."""

    layers: dict[int, LowRankStacks]
    rows: Mapping[int, AdapterTokenRows]
    """Rows that replace or extend a table's, by index of the table."""
    num_added: int = 0
    """Number of added tokens."""
    base_model: str = ""
    """Base model according to its config."""
    norms: dict[int, RowNorms] = field(default_factory=dict)
    """Row norms of layers whose inputs are sharded over ranks, until they are complete."""
    kept: Mapping[int, torch.dtype] = field(default_factory=dict)
    """Dtype in which the weights of such layers are stored afterwards."""

    def finish_norms(self) -> None:
        """Complete the DoRA norms by an all-reduce; all ranks call this at once, and the first call counts."""
        apply_row_norms(self.norms, self.layers)
        self.layers.update(
            {index: quantize_adapter(self.layers[index], self.kept[index]) for index in self.norms}
        )
        self.norms.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        stacks, rows = self.layers.values(), self.rows.values()
        return sum(one.nbytes for one in stacks) + sum(one.nbytes for one in rows)


def read_adapter(
    directory: Path,
    targets: Targets,
    max_rank: int,
    dtype: torch.dtype,
    *,
    max_rows: int = 0,
    max_added: int = 0,
    row_dtype: torch.dtype | None = None,
) -> Adapter:
    """Read the adapter of a directory for a model with these targets, its weights in `dtype`.

    It may replace `max_rows` rows of a table, in `row_dtype` (None: `dtype`), of which `max_added` extend the table.

    Raises:
        ModelLoadError: a file is missing or corrupt, or a tensor does not match the model or these limits.
        UnsupportedModelError: the config has an option that quire does not support.
    """
    config = read_peft_config(directory)
    file = SafetensorsFile(_weights_file(directory))
    modules = adapted_modules(file, config, targets, max_rank, max_added)
    by_layer: dict[int, list[AdaptedModule]] = {}
    for module in modules:
        for index in dict.fromkeys(place.layer for place in module.target.places if module.layer_tensors):
            if targets.layers[index].is_here:
                by_layer.setdefault(index, []).append(module)
    rows = read_own_rows(file, modules, targets, max_rows, row_dtype or dtype)
    layers, norms = {}, {}
    memory = SlotMemory(torch.device("cpu"), _BLOCK_BYTES)
    for index, found in by_layer.items():
        reader = _LayerReader(file, targets, index, memory)
        layers[index] = reader.stacks(found, dtype)
        if reader.norms is not None:
            norms[index] = reader.norms
    apply_row_norms({index: own for index, own in norms.items() if own.group is None}, layers)
    shared = {index: own for index, own in norms.items() if own.group is not None}
    kept = {index: targets.layers[index].kept(dtype) for index in layers}
    for index in layers.keys() - shared.keys():
        layers[index] = quantize_adapter(layers[index], kept[index])
    return Adapter(layers, rows, count_added(file, rows, targets), config.base_model, shared, kept)


def _weights_file(directory: Path) -> Path:
    path = directory / WEIGHTS_NAME
    if has_file(path):
        return path
    if has_file(directory / _PICKLED_NAME):
        raise ModelLoadError(
            f"{directory / _PICKLED_NAME}: pickled weights are not supported; convert them to safetensors"
        )
    raise ModelLoadError(f"{path}: no such file")


def _row_norms(own: Adaptable) -> RowNorms:
    """Return empty norms of a layer, with the group that has the other parts of its rows."""
    layer = own.layer
    if isinstance(layer, Slice):
        turn = own.turn if isinstance(own, AdaptableTurn) else 0
        return RowNorms(own.num_rows, own.scale_rows, layer.summed_by, f"{layer.name} {turn}")
    is_shared = length(own.columns) != own.inputs
    return RowNorms(own.num_rows, own.scale_rows, layer.group if is_shared else None)


class _LayerReader:
    """Reader of the part of an adapter that one layer of this rank computes."""

    def __init__(self, file: SafetensorsFile, targets: Targets, index: int, memory: SlotMemory) -> None:
        self._file = file
        self._memory = memory
        self._index = index
        self._own = targets.layers[index]
        self._layer = self._own.layer
        self._weight: Tensor | None = None
        self.norms: RowNorms | None = None
        """DoRA's row norms, if a module has them."""

    def stacks(self, modules: Sequence[AdaptedModule], dtype: torch.dtype) -> LowRankStacks:
        """Return the stacks of one adapter."""
        rank = max(module.rank for module in modules)
        stacks = self._own.stacks(1, rank, reading_dtype(self._own.kept(dtype)), self._memory)
        stacks.factors.fill_(1.0)
        for module in modules:
            tensors = {
                kind: module.take(kind, self._file.tensor(info))
                for kind, info in module.layer_tensors.items()
            }
            if "weight" in tensors:
                tensors |= {"a": tensors["weight"], "b": torch.eye(module.rank)}
            for place in module.target.places:
                if place.layer == self._index:
                    self._fill(stacks, place, module, tensors)
        return stacks

    def _fill(
        self, stacks: LowRankStacks, place: OutputPlace, module: AdaptedModule, tensors: Mapping[Kind, Tensor]
    ) -> None:
        part, rank, here, rows = place.part, module.rank, place.piece.place, place.piece.rows
        if rank:
            a, b = tensors["a"], tensors["b"]
            if "magnitude" in tensors:
                self._norms().add(
                    here,
                    self._changed(here, module.scale, a.float(), b[rows].float()),
                    tensors["magnitude"][rows].float(),
                    self._own_bias(place),
                )
            self._own.put(stacks, part, place.piece, a, b)
            stacks.scales[:, part] = module.scale
            stacks.ranks[:, part] = rank
        if "weight" in tensors:
            stacks.factors[0, here] = 0.0  # the layer's own output does not count
        if tensors.keys() - {"a", "b"}:
            self._own.offset(stacks, part, place.piece, self._offsets(place, module, tensors))

    def _offsets(
        self, place: OutputPlace, module: AdaptedModule, tensors: Mapping[Kind, Tensor]
    ) -> Tensor | float:
        """Return what its biases add to the layer's outputs."""
        rows = place.piece.rows
        if not self._layer.adds_once:
            return 0.0
        if "weight" in tensors:
            return tensors["bias"][rows] if "bias" in tensors else self._own_bias(place)
        offsets: Tensor | float = 0.0
        if "bias" in tensors:
            offsets = tensors["bias"][rows].float() - self._own_bias(place)
        if "expand_bias" in tensors:
            offsets = offsets + module.scale * tensors["expand_bias"][rows].float()
        return offsets

    def _own_bias(self, place: OutputPlace) -> Tensor | float:
        bias = self._own.bias
        return 0.0 if bias is None else bias.detach()[place.piece.place].float().cpu()

    def _norms(self) -> RowNorms:
        if self.norms is None:
            self.norms = _row_norms(self._own)
        return self.norms

    def _changed(self, here: slice, scale: float, a: Tensor, b: Tensor) -> Iterator[Tensor]:
        """Yield rows of the weight, as quantized, plus the product, in chunks of columns."""
        if self._weight is None:
            self._weight = self._own.weight()
        a = a[:, self._own.columns]
        for start in range(0, a.shape[1], _COLUMNS):
            columns = slice(start, start + _COLUMNS)
            yield self._weight[here, columns].float().cpu() + scale * _product(b, a[:, columns])


def _product(b: Tensor, a: Tensor) -> Tensor:
    """Return b @ a, each element one sum in order of ranks, however many rows a tensor-parallel rank has."""
    if not b.numel():
        return b @ a
    return ops.packed_linear(a.t().contiguous(), ops.pack_weight(b.contiguous(), FLOAT)).t().contiguous()
