"""What of a model adapters may change: its linear layers, by the names of the checkpoint's modules.

Invariant: a module is a target only if all of its outputs are made by layers that can add something of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.layers.linear import Linear
from quire.layers.matrix import Piece
from quire.layers.slot import length
from quire.models.base import CausalLM


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


@dataclass(frozen=True, slots=True)
class AdaptableLayer:
    """A layer, and the outputs of each part of it: a module that is merged with others has a part of its own."""

    layer: Linear
    parts: tuple[int, ...]


class Targets:
    """The adaptable layers of a model, in its order, and the modules that they stand for."""

    def __init__(self, model: CausalLM) -> None:
        self._part_of = model.config.arch.part_of
        found = [
            (names, layer)
            for names, layer in model.checkpoint_layers()
            if isinstance(layer, Linear) and layer.takes_adapters
        ]
        self.layers = [AdaptableLayer(layer, _parts(names, layer)) for names, layer in found]
        places: dict[str, list[Place]] = {}
        for index, (names, layer) in enumerate(found):
            for place in _places(index, names, layer, self.layers[index].parts):
                places.setdefault(place.piece.name, []).append(place)
        inputs = {name: self.layers[own[0].layer].layer.inputs for name, own in places.items()}
        self.modules: Mapping[str, Target] = {
            name: Target(own[0].piece.num_rows, inputs[name], tuple(own))
            for name, own in places.items()
            if sum(length(place.piece.region) for place in own) == own[0].piece.num_rows
        }

    def name_of(self, module: str) -> str:
        """What a module is called here, by its name in the whole model that the checkpoint is of."""
        return module if self._part_of is None else self._part_of.name_alone(module)

    def has_bias(self, target: Target) -> bool:
        """Whether all layers that make a module's outputs add a bias."""
        return all(self.layers[place.layer].layer.has_bias for place in target.places)


def _parts(names: Sequence[str], layer: Linear) -> tuple[int, ...]:
    return (layer.num_rows,) if len(names) == 1 else tuple(map(length, layer.rows))


def _places(index: int, names: Sequence[str], layer: Linear, parts: Sequence[int]) -> list[Place]:
    starts = [sum(parts[:part]) for part in range(len(parts))]
    return [
        Place(index, max(part for part, start in enumerate(starts) if start <= piece.place.start), piece)
        for piece in layer.pieces(names)
    ]
