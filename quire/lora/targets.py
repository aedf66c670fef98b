"""What of a model adapters may change: its linear layers and tables, by the names of the checkpoint's modules.

Invariant: a module is a target only if all of its outputs are made by layers that can add something of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.layers.embedding import VocabEmbedding
from quire.layers.matrix import Piece
from quire.layers.slot import length
from quire.lora.adaptable import Adaptable, adaptable_layers
from quire.models.base import CausalLM

HEAD = "lm_head"


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


class Targets:
    """What of a model can have adapters, in its order, and the modules that it stands for."""

    def __init__(self, model: CausalLM) -> None:
        self._part_of = model.config.arch.part_of
        self._head = model.renamed.get(HEAD, HEAD)
        found = list(adaptable_layers(model))
        self.layers = [own for _, own in found]
        places: dict[str, list[Place]] = {}
        for index, (names, own) in enumerate(found):
            for place in _places(index, names, own):
                places.setdefault(place.piece.name, []).append(place)
        self.modules: Mapping[str, Target] = {
            name: self._target(of)
            for name, of in places.items()
            if sum(length(place.piece.region) for place in of) == of[0].piece.num_rows
        }

    def name_of(self, module: str) -> str:
        """What a module is called here, by its name in the whole model that the checkpoint is of.

        The head may go by transformers' name for it, which some checkpoints are older than.
        """
        own = module if self._part_of is None else self._part_of.name_alone(module)
        return self._head if own == HEAD else own

    def _target(self, places: Sequence[Place]) -> Target:
        own = self.layers[places[0].layer]
        has_rows = isinstance(own.layer, VocabEmbedding)
        return Target(places[0].piece.num_rows, own.inputs, tuple(places), own.is_table, has_rows)

    def has_bias(self, target: Target) -> bool:
        """Whether all layers that make a module's outputs add a bias."""
        layers = [self.layers[place.layer] for place in target.places]
        return all(own.layer.has_bias and not own.is_table for own in layers)


def _places(index: int, names: Sequence[str], own: Adaptable) -> list[Place]:
    starts = [sum(own.parts[:part]) for part in range(len(own.parts))]
    return [
        Place(index, max(part for part, start in enumerate(starts) if start <= piece.place.start), piece)
        for piece in own.pieces(names)
    ]
