# SPDX-License-Identifier: Apache-2.0
"""Targets of LoRA: linear layers and embedding tables, by the names of the checkpoint's modules.

Invariant: a module is a target only if layers that support adapters compute all of its outputs.

By marks a rank recognizes rows of the model that another rank holds. A mark is two sums of a row's numbers, as
integers, times random factors, modulo 2**64 (J. Carter and M. Wegman, 1979): two different rows have equal marks with
probability 2**-64 or less. Shapes: n rows of H numbers; marks int64 [n, 2].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.arch import ExpertsArch
from quire.kernels import ops
from quire.layers.base import Layer
from quire.layers.embedding import VocabEmbedding
from quire.layers.matrix import ModuleRows
from quire.layers.sliced_linear import Slice
from quire.layers.slot import length
from quire.lora.adaptable import Adaptable, AdaptableExpert, AdaptableHead, AdaptableTurn, adaptable_layers
from quire.models.base import CausalLM

HEAD = "lm_head"
_EXPERTS = re.compile(r".*?\.(\d+)\.(?:.*\.)?experts")  # transformers' name of a layer's experts


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """Place of a module's outputs: the layer, its part, and the range within."""

    layer: int
    part: int
    piece: ModuleRows


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """Module of the checkpoint, [outputs, inputs], and the places of its outputs."""

    outputs: int
    inputs: int
    places: tuple[OutputPlace, ...]
    is_table: bool
    """True if its inputs are token ids."""
    has_rows: bool
    """True for an embedding table or the head."""
    no_dora: str
    """Reason why DoRA is not supported; "": it is."""
    has_biases: bool
    """True if an adapter may add a bias."""
    is_head: bool = False
    """True if an adapter may replace the whole weight: a layer after the pooler."""
    is_of_adapters: bool = False
    """True if an adapter must have the whole weight, because the model has none."""


@dataclass(frozen=True, slots=True)
class ExpertTarget:
    """One weight of each expert of a layer, gate above up, which transformers stores as one parameter."""

    targets: tuple[AdapterTarget, ...]
    interleaved: bool
    """True if gate and up outputs alternate in the parameter."""
    is_transposed: bool
    """True if the parameter is [inputs, outputs] without declaring it."""


class Targets:
    """Layers of a model that support adapters, in its order, and the modules that they stand for.

    All ranks construct it at once.
    """

    def __init__(self, model: CausalLM) -> None:
        self._part_of = model.config.arch.part_of
        other_parts = () if self._part_of is None else self._part_of.unused
        self._unused = (*model.unused, *other_parts)
        self._head = model.renamed.get(HEAD, HEAD)
        adapters = model.config.arch.names.adapters
        of_adapters = "" if adapters is None else adapters.renamed.get("model", "model") + "."
        self._prefixes = ("", of_adapters, model.base_prefix)
        found = list(adaptable_layers(model))
        self.layers = [own for _, _, own in found]
        places: dict[str, list[OutputPlace]] = {}
        for index, (names, stored, own) in enumerate(found):
            for place in (*_places(index, names, own), *_places(index, _other(stored, names), own)):
                places.setdefault(place.piece.name, []).append(place)
        self.modules: Mapping[str, AdapterTarget] = {
            name: self._target(of) for name, of in places.items() if self._makes_all(of)
        }
        self._idle = frozenset(_idle_modules(found))
        tables = dict.fromkeys(own.layer for own in self.layers if own.is_here)
        self.marks: Mapping[Layer, Tensor] = {
            layer: table_marks(layer)
            for layer in tables
            if isinstance(layer, VocabEmbedding) and layer.group is not None
        }
        """Marks of all rows of each table that is sharded over ranks."""
        self._experts = _expert_weights(model.config.arch.experts, found)

    def find_experts(self, module: str) -> Mapping[str, ExpertTarget] | None:
        """Return the expert weights, by name, of a layer's experts by transformers' name; None if it is none.

        A layer has one set of experts; the module around them has had several names.
        """
        match = _EXPERTS.fullmatch(self.name_of(module))
        return None if match is None else self._experts.get(match[1])

    def name_of(self, module: str) -> str:
        """Return the name of a module here, from its name in the checkpoint's whole model.

        The head may have transformers' name, which is newer than some checkpoints. Adapters of a model without head
        (transformers' AutoModel) lack the prefix of a model with one.
        """
        own = module if self._part_of is None else self._part_of.name_alone(module)
        own = self._head if own == HEAD else own
        return next((prefix + own for prefix in self._prefixes if prefix + own in self.modules), own)

    def is_idle(self, module: str) -> bool:
        """Return whether transformers has the module but never runs it, so that an adapter for it has no effect."""
        own = module if self._part_of is None else self._part_of.name_alone(module)
        return any(prefix + own in self._idle for prefix in self._prefixes)

    def is_left_out(self, tensor: str) -> bool:
        """Return whether a tensor is for a part of the checkpoint that is not served, such as a vision tower.

        `tensor` is its name in the whole model, with the adapter's suffix.
        """
        own = tensor if self._part_of is None else self._part_of.name_alone(tensor)
        return any(re.search(pattern, own) for pattern in self._unused)

    def _target(self, places: Sequence[OutputPlace]) -> AdapterTarget:
        own = self.layers[places[0].layer]
        has_rows = isinstance(own.layer, VocabEmbedding)
        return AdapterTarget(
            places[0].piece.num_rows,
            own.inputs,
            tuple(places),
            own.is_table,
            has_rows,
            self._why_no_dora(own),
            own.has_biases,
            isinstance(own, AdaptableHead),
            isinstance(own, AdaptableHead) and own.layer.is_of_adapters,
        )

    def _why_no_dora(self, own: Adaptable) -> str:
        is_sliced = any(isinstance(other.layer, Slice) for other in self.layers)
        if own.is_table and is_sliced:  # ranks have tokens of their own, which no slices are made of
            return "of a table, for which use_dora is not supported with --tp-invariant"
        return ""

    def _makes_all(self, places: Sequence[OutputPlace]) -> bool:
        """Return whether all outputs of a module are computed at these places, for each slice of its inputs."""
        made: dict[tuple[int, int], int] = {}
        for place in places:
            columns = self.layers[place.layer].columns
            key = (columns.start, columns.stop)
            made[key] = made.get(key, 0) + length(place.piece.region)
        return {*made.values()} == {places[0].piece.num_rows}

    def has_bias(self, target: AdapterTarget) -> bool:
        """Return whether all layers that compute a module's outputs add a bias."""
        layers = [self.layers[place.layer] for place in target.places]
        return all(own.layer.has_bias and not own.is_table for own in layers)


def _idle_modules(found: Sequence[tuple[list[str], list[str], Adaptable]]) -> Iterator[str]:
    for names, _, own in found:
        if isinstance(own, AdaptableTurn) and own.layer.turns is not None:
            turns = own.layer.turns
            for layer in turns.idle:
                yield from (
                    name.replace(f".layers.{turns.layers[0]}.", f".layers.{layer}.", 1) for name in names
                )


def _other(stored: list[str], names: list[str]) -> list[str]:
    """Return the checkpoint's names of modules if they differ from transformers'; adapters may use either."""
    return [] if stored == names else stored


def _places(index: int, names: Sequence[str], own: Adaptable) -> list[OutputPlace]:
    if not names:
        return []
    starts = [sum(own.parts[:part]) for part in range(len(own.parts))]
    return [
        OutputPlace(
            index, max(part for part, start in enumerate(starts) if start <= piece.place.start), piece
        )
        for piece in own.pieces(names)
    ]


def _expert_weights(
    arch: ExpertsArch | None, found: Sequence[tuple[list[str], list[str], Adaptable]]
) -> Mapping[str, Mapping[str, ExpertTarget]]:
    """Return the expert weights of each layer, by its number."""
    targets: dict[str, dict[str, list[AdapterTarget]]] = {}
    for index, (_, _, own) in enumerate(found):
        if isinstance(own, AdaptableExpert):
            experts, _, matrix = own.layer.name.rsplit(".", 2)
            match = _EXPERTS.fullmatch(experts)
            assert match is not None, experts
            pieces = own.layer.pieces_of(own.layer.name, range(len(own.parts)))
            places = tuple(OutputPlace(index, part, piece) for part, piece in enumerate(pieces))
            target = AdapterTarget(places[0].piece.num_rows, own.inputs, places, False, False, "", True)
            targets.setdefault(match[1], {}).setdefault(matrix, []).append(target)
    alternates = arch is not None and arch.alternates
    # Where they alternate, transformers declares the transposition.
    is_transposed = (
        arch is not None and arch.stack is not None and bool(arch.stack.transposed) and not alternates
    )
    return {
        layer: {
            matrix: ExpertTarget(tuple(of), alternates and matrix == "gate_up_proj", is_transposed)
            for matrix, of in matrices.items()
        }
        for layer, matrices in targets.items()
    }


_CHUNK = 256  # rows multiplied at once


def marks_of(rows: Tensor) -> Tensor:
    """Map rows [n, H] to marks [n, 2] on the host; 0.0 and -0.0 are equal."""
    found = []
    for part in torch.split(rows, _CHUNK):
        numbers = (part.float().cpu() + 0.0).view(torch.int32).long()
        found.append(torch.stack([(numbers * own).sum(1) for own in _factors(rows.shape[1])], 1))
    return torch.cat(found) if found else torch.zeros(0, 2, dtype=torch.int64)


def table_marks(layer: VocabEmbedding) -> Tensor:
    """Return the marks of all rows [V, 2] of a sharded table, as stored; all ranks call this at once."""
    assert layer.group is not None, "rows of an unsharded table are compared directly"
    device = next(iter(layer.tensors().values())).device
    ids = torch.arange(length(layer.rows[0]), device=device)
    marks = torch.cat([marks_of(layer.rows_here(part)) for part in torch.split(ids, _CHUNK)])
    shown = F.pad(marks, (0, 0, 0, layer.share - len(marks)))
    return ops.all_gather(shown, layer.group, 0)[: layer.shape[0]]


@cache
def _factors(size: int) -> Tensor:
    """Return two random factors for each number of a row, equal on all ranks: [2, size] odd int64."""
    generator = torch.Generator().manual_seed(size)
    halves = torch.randint(0, 1 << 32, (2, 2, size), generator=generator, dtype=torch.int64)
    return (halves[0] << 32) | halves[1] | 1
