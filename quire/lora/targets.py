"""What of a model adapters may change: its linear layers and tables, by the names of the checkpoint's modules.

Invariant: a module is a target only if all of its outputs are made by layers that can add something of an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.config.arch import ExpertsArch
from quire.layers.base import Layer
from quire.layers.embedding import VocabEmbedding
from quire.layers.matrix import Piece
from quire.layers.sliced_linear import Slice
from quire.layers.slot import length
from quire.lora.adaptable import (
    Adaptable,
    AdaptableExpert,
    AdaptableHead,
    AdaptableTurn,
    adaptable_layers,
)
from quire.lora.row_marks import table_marks
from quire.models.base import CausalLM

HEAD = "lm_head"
_EXPERTS = re.compile(r".*?\.(\d+)\.(?:.*\.)?experts")
"""What transformers calls the experts of a layer, and the layer's number."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where outputs of a module stand: in which layer, and in which of the parts that adapters of the layer have."""

    layer: int
    part: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Target:
    """A module of the checkpoint, [outputs, inputs], and where its outputs are made."""

    outputs: int
    inputs: int
    places: tuple[Place, ...]
    is_table: bool
    """Whether its inputs are tokens, whose rows are looked up."""
    has_rows: bool
    """Whether it is such a table or the head, whose outputs are tokens."""
    no_lengths: str
    """Why what its outputs are multiplied by cannot be an adapter's; "": it can."""
    has_biases: bool
    """Whether what is added to them can be."""
    is_head: bool = False
    """Whether all of its weight can be an adapter's: a layer behind what is pooled."""
    is_of_adapters: bool = False
    """Whether all of its weight must be, for the model has none."""


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One matrix of each expert of a layer, gate above up, which transformers has as one parameter."""

    targets: tuple[Target, ...]
    interleaved: bool
    """Whether the parameter's outputs of gate and up alternate."""
    is_transposed: bool
    """Whether the parameter's matrices are [inputs, outputs] where nothing says so."""


class Targets:
    """What of a model can have adapters, in its order, and the modules that it stands for.

    All ranks make theirs at once.
    """

    def __init__(self, model: CausalLM) -> None:
        self._part_of = model.config.arch.part_of
        of_other_parts = () if self._part_of is None else self._part_of.unused
        self._unused = (*model.unused, *of_other_parts)
        self._head = model.renamed.get(HEAD, HEAD)
        adapters = model.config.arch.names.adapters
        of_adapters = "" if adapters is None else adapters.renamed.get("model", "model") + "."
        self._prefixes = ("", of_adapters, model.base_prefix)
        found = list(adaptable_layers(model))
        self.layers = [own for _, _, own in found]
        places: dict[str, list[Place]] = {}
        for index, (names, stored, own) in enumerate(found):
            for place in (*_places(index, names, own), *_places(index, _other(stored, names), own)):
                places.setdefault(place.piece.name, []).append(place)
        self.modules: Mapping[str, Target] = {
            name: self._target(of) for name, of in places.items() if self._makes_all(of)
        }
        self._idle = frozenset(_idle_modules(found))
        tables = dict.fromkeys(own.layer for own in self.layers if own.is_here)
        self.marks: Mapping[Layer, Tensor] = {
            layer: table_marks(layer)
            for layer in tables
            if isinstance(layer, VocabEmbedding) and layer.group is not None
        }
        """Of each table that ranks share, all rows'."""
        self._experts = _expert_matrices(model.config.arch.experts, found)

    def experts_of(self, module: str) -> Mapping[str, ExpertMatrices] | None:
        """The matrices, by their names, of a layer's experts, by what transformers calls these; None if it is none.

        A layer has them once, and what they are part of has had several names.
        """
        match = _EXPERTS.fullmatch(self.name_of(module))
        return None if match is None else self._experts.get(match[1])

    def name_of(self, module: str) -> str:
        """What a module is called here, by its name in the whole model that the checkpoint is of.

        The head may go by transformers' name for it, which some checkpoints are older than. What stands before all
        names of a model that has a head is missing in an adapter of one without (transformers' AutoModel).
        """
        own = module if self._part_of is None else self._part_of.name_alone(module)
        own = self._head if own == HEAD else own
        return next((prefix + own for prefix in self._prefixes if prefix + own in self.modules), own)

    def is_idle(self, module: str) -> bool:
        """Whether transformers has a module, and nothing asks it there: what an adapter has for it is nothing."""
        own = module if self._part_of is None else self._part_of.name_alone(module)
        return any(prefix + own in self._idle for prefix in self._prefixes)

    def is_left_out(self, tensor: str) -> bool:
        """Return whether a tensor is for a part of the checkpoint that is not served, such as a vision tower.

        `tensor` is its name in the whole model, with whatever an adapter has behind the module's.
        """
        own = tensor if self._part_of is None else self._part_of.name_alone(tensor)
        return any(re.search(pattern, own) for pattern in self._unused)

    def _target(self, places: Sequence[Place]) -> Target:
        own = self.layers[places[0].layer]
        has_rows = isinstance(own.layer, VocabEmbedding)
        return Target(
            places[0].piece.num_rows,
            own.inputs,
            tuple(places),
            own.is_table,
            has_rows,
            self._why_no_lengths(own),
            own.has_biases,
            isinstance(own, AdaptableHead),
            isinstance(own, AdaptableHead) and own.layer.is_of_adapters,
        )

    def _why_no_lengths(self, own: Adaptable) -> str:
        is_sliced = any(isinstance(other.layer, Slice) for other in self.layers)
        if own.is_table and is_sliced:  # ranks have tokens of their own, which no slices are made of
            return "of a table, for which use_dora is not supported with --tp-invariant"
        return ""

    def _makes_all(self, places: Sequence[Place]) -> bool:
        """Whether all outputs of a module are made there, of each slice of its inputs, if it is cut into slices."""
        made: dict[tuple[int, int], int] = {}
        for place in places:
            columns = self.layers[place.layer].columns
            key = (columns.start, columns.stop)
            made[key] = made.get(key, 0) + length(place.piece.region)
        return {*made.values()} == {places[0].piece.num_rows}

    def has_bias(self, target: Target) -> bool:
        """Whether all layers that make a module's outputs add a bias."""
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
    """What a checkpoint calls modules, if it is not what transformers does: adapters may name them so, too."""
    return [] if stored == names else stored


def _places(index: int, names: Sequence[str], own: Adaptable) -> list[Place]:
    if not names:
        return []
    starts = [sum(own.parts[:part]) for part in range(len(own.parts))]
    return [
        Place(index, max(part for part, start in enumerate(starts) if start <= piece.place.start), piece)
        for piece in own.pieces(names)
    ]


def _expert_matrices(
    arch: ExpertsArch | None, found: Sequence[tuple[list[str], list[str], Adaptable]]
) -> Mapping[str, Mapping[str, ExpertMatrices]]:
    """Those of each layer, by its number."""
    targets: dict[str, dict[str, list[Target]]] = {}
    for index, (_, _, own) in enumerate(found):
        if isinstance(own, AdaptableExpert):
            experts, _, matrix = own.layer.name.rsplit(".", 2)
            match = _EXPERTS.fullmatch(experts)
            assert match is not None, experts
            pieces = own.layer.pieces_of(own.layer.name, range(len(own.parts)))
            places = tuple(Place(index, part, piece) for part, piece in enumerate(pieces))
            target = Target(places[0].piece.num_rows, own.inputs, places, False, False, "", True)
            targets.setdefault(match[1], {}).setdefault(matrix, []).append(target)
    alternates = arch is not None and arch.alternates
    # Where they alternate, transformers says that they are transposed.
    is_transposed = (
        arch is not None and arch.stack is not None and bool(arch.stack.transposed) and not alternates
    )
    return {
        layer: {
            matrix: ExpertMatrices(tuple(of), alternates and matrix == "gate_up_proj", is_transposed)
            for matrix, of in matrices.items()
        }
        for layer, matrices in targets.items()
    }
