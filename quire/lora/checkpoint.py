"""Reads an adapter's directory, in the layout of PEFT, into the form in which layers take it.

Invariant: all that the directory holds fits the model and the limits, or nothing of it is used.
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
from quire.kernels.lora import LoraStacks, SlotMemory
from quire.layers.own_rows import TokenRows
from quire.layers.sliced_linear import Slice
from quire.layers.slot import length
from quire.lora.adaptable import Adaptable, AdaptableTurn
from quire.lora.adapted import AdaptedModule, Kind
from quire.lora.directory import WEIGHTS_NAME
from quire.lora.modules import adapted_modules
from quire.lora.own_rows import count_added, read_own_rows
from quire.lora.peft_config import read_peft_config
from quire.lora.rounding import read_as, rounded
from quire.lora.row_lengths import RowLengths, settle
from quire.lora.targets import Place, Targets
from quire.models.checkpoint_files import has_file
from quire.models.safetensors_file import SafetensorsFile

_COLUMNS = 16384
"""Of a weight that are looked at together: those of a table are many."""
_PICKLED_NAME = "adapter_model.bin"
_BLOCK_BYTES = 4 << 20
"""Of memory that is asked for at a time: it takes as long to ask for that of each layer as to fill it."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter on the host: by the index of each layer that it changes, stacks with a single slot."""

    layers: dict[int, LoraStacks]
    rows: Mapping[int, TokenRows]
    """By the index of each table, rows in place of its own, or behind them."""
    num_added: int = 0
    """Tokens behind the model's."""
    base_model: str = ""
    """What it says that it was trained on."""
    lengths: dict[int, RowLengths] = field(default_factory=dict)
    """Of layers whose inputs ranks share, until they are settled."""
    kept: Mapping[int, torch.dtype] = field(default_factory=dict)
    """What the matrices of such layers are kept in from then on."""

    def settle(self) -> None:
        """Have ranks put together what each knows a part of; all do at once, and the first time counts."""
        settle(self.lengths, self.layers)
        self.layers.update({index: rounded(self.layers[index], self.kept[index]) for index in self.lengths})
        self.lengths.clear()

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
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
    """The adapter of a directory, for the model that has these targets, its matrices rounded to `dtype`.

    It may have `max_rows` rows of its own in a table, in `row_dtype` (None: in `dtype`), of which `max_added` are
    behind the table's.

    Raises:
        ModelLoadError: a file is missing or corrupt, or a tensor does not fit the model or these limits.
        UnsupportedModelError: the config asks for what quire does not do.
    """
    config = read_peft_config(directory)
    file = SafetensorsFile(_weights_file(directory))
    modules = adapted_modules(file, config, targets, max_rank, max_added)
    by_layer: dict[int, list[AdaptedModule]] = {}
    for module in modules:
        for index in dict.fromkeys(place.layer for place in module.target.places if module.of_layers):
            if targets.layers[index].is_here:
                by_layer.setdefault(index, []).append(module)
    rows = read_own_rows(file, modules, targets, max_rows, row_dtype or dtype)
    layers, lengths = {}, {}
    memory = SlotMemory(torch.device("cpu"), _BLOCK_BYTES)
    for index, found in by_layer.items():
        reader = _LayerReader(file, targets, index, memory)
        layers[index] = reader.stacks(found, dtype)
        if reader.lengths is not None:
            lengths[index] = reader.lengths
    settle({index: own for index, own in lengths.items() if own.group is None}, layers)
    shared = {index: own for index, own in lengths.items() if own.group is not None}
    kept = {index: targets.layers[index].kept(dtype) for index in layers}
    for index in layers.keys() - shared.keys():
        layers[index] = rounded(layers[index], kept[index])
    return Adapter(layers, rows, count_added(file, rows, targets), config.base_model, shared, kept)


def _weights_file(directory: Path) -> Path:
    path = directory / WEIGHTS_NAME
    if has_file(path):
        return path
    if has_file(directory / _PICKLED_NAME):
        raise ModelLoadError(
            f"{directory / _PICKLED_NAME}: pickled weights cannot be used, convert to safetensors"
        )
    raise ModelLoadError(f"{path}: no such file")


def _row_lengths(own: Adaptable) -> RowLengths:
    """Those of a layer, and who knows what of its rows it has not."""
    layer = own.layer
    if isinstance(layer, Slice):
        turn = own.turn if isinstance(own, AdaptableTurn) else 0
        return RowLengths(own.num_rows, own.lengthen, layer.summed_by, f"{layer.name} {turn}")
    is_shared = length(own.columns) != own.inputs
    return RowLengths(own.num_rows, own.lengthen, layer.group if is_shared else None)


class _LayerReader:
    """Puts what modules have, as far as this rank has them, where a layer makes their outputs."""

    def __init__(self, file: SafetensorsFile, targets: Targets, index: int, memory: SlotMemory) -> None:
        self._file = file
        self._memory = memory
        self._index = index
        self._own = targets.layers[index]
        self._layer = self._own.layer
        self._weight: Tensor | None = None
        self.lengths: RowLengths | None = None
        """What DoRA divides by, if any of the modules has it."""

    def stacks(self, modules: Sequence[AdaptedModule], dtype: torch.dtype) -> LoraStacks:
        """Those of one adapter."""
        rank = max(module.rank for module in modules)
        stacks = self._own.stacks(1, rank, read_as(self._own.kept(dtype)), self._memory)
        stacks.factors.fill_(1.0)
        for module in modules:
            tensors = {
                kind: module.take(kind, self._file.tensor(info)) for kind, info in module.of_layers.items()
            }
            if "weight" in tensors:
                tensors |= {"a": tensors["weight"], "b": torch.eye(module.rank)}
            for place in module.target.places:
                if place.layer == self._index:
                    self._fill(stacks, place, module, tensors)
        return stacks

    def _fill(
        self, stacks: LoraStacks, place: Place, module: AdaptedModule, tensors: Mapping[Kind, Tensor]
    ) -> None:
        part, rank, here, rows = place.part, module.rank, place.piece.place, place.piece.rows
        if rank:
            a, b = tensors["a"], tensors["b"]
            if "magnitude" in tensors:
                self._lengths().add(
                    here,
                    self._changed(here, module.scale, a.float(), b[rows].float()),
                    tensors["magnitude"][rows].float(),
                    self._own_bias(place),
                )
            self._own.put(stacks, part, place.piece, a, b)
            stacks.scales[:, part] = module.scale
            stacks.ranks[:, part] = rank
        if "weight" in tensors:
            stacks.factors[0, here] = 0.0  # what the layer makes itself does not count
        if tensors.keys() - {"a", "b"}:
            self._own.offset(stacks, part, place.piece, self._offsets(place, module, tensors))

    def _offsets(self, place: Place, module: AdaptedModule, tensors: Mapping[Kind, Tensor]) -> Tensor | float:
        """What its biases add to what the layer makes."""
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

    def _own_bias(self, place: Place) -> Tensor | float:
        bias = self._own.bias
        return 0.0 if bias is None else bias.detach()[place.piece.place].float().cpu()

    def _lengths(self) -> RowLengths:
        if self.lengths is None:
            self.lengths = _row_lengths(self._own)
        return self.lengths

    def _changed(self, here: slice, scale: float, a: Tensor, b: Tensor) -> Iterator[Tensor]:
        """Rows of the weight, as it was rounded, with the product, some columns after the other."""
        if self._weight is None:
            self._weight = self._own.weight()
        a = a[:, self._own.columns]
        for start in range(0, a.shape[1], _COLUMNS):
            columns = slice(start, start + _COLUMNS)
            yield self._weight[here, columns].float().cpu() + scale * _product(b, a[:, columns])


def _product(b: Tensor, a: Tensor) -> Tensor:
    """b @ a, of which each element is one sum in order of ranks, however many rows a rank of the model has."""
    if not b.numel():
        return b @ a
    return ops.packed_linear(a.t().contiguous(), ops.pack_weight(b.contiguous(), FLOAT)).t().contiguous()
