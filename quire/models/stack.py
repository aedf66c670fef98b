"""Layers in a row between what only the first and what only the last pipeline stage has.

Shapes: T tokens of the step, S features of what one stage hands on to the next, which is [T, S].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.base import Module
from quire.layers.step import StepContext

STREAM = "stream"
"""Of `StepContext.intermediate`: [T, S] what the layers before a stage's have made."""


class Elsewhere(Module):
    """In the place of a layer that another stage has."""


class Stack(Module):
    """Base of what is under a model's head: it computes `layers[own]`, and what of the ends its stage has."""

    entering: tuple[str, ...] = ("embed_tokens", "embed_positions", "embed_norm")
    """Names of what the first stage alone has; the table of tokens is in the last one as well where it is the head."""
    leaving: tuple[str, ...] = ("norm",)
    """Names of what the last stage alone has."""
    layers: nn.ModuleList

    def __init__(self, *, config: EngineConfig) -> None:
        super().__init__()
        self.enters = self.ends = True
        self.own = range(config.arch.num_layers)
        """Numbers of the layers that are here."""
        self._hidden_size = config.arch.hidden_size

    def own_layers(self) -> Iterator[tuple[int, Any]]:
        """Those that are here, in their order, and their numbers."""
        return islice(enumerate(self.layers), self.own.start, self.own.stop)

    def joined(self) -> Collection[int]:
        """Numbers of the layers that are in the same stage as the one before them."""
        return ()

    def stream_size(self, layer: int) -> int:
        """Features of what goes into a layer that begins a stage."""
        return self._hidden_size

    def end_modules(self, names: Collection[str]) -> list[nn.Module]:
        """Those of `entering` or `leaving` that the model has."""
        found = (getattr(self, name, None) for name in names)
        return [module for module in found if isinstance(module, nn.Module)]

    def take_stage(self, own: range, shared: Collection[nn.Module]) -> None:
        """Let go of everything but some neighbouring layers and the ends that they are at; called once, if at all.

        `shared` are modules of another stage that this one reads, too.
        """
        self.enters, self.ends, self.own = own.start == 0, own.stop == len(self.layers), own
        for number in range(len(self.layers)):
            if number not in own:
                self.layers[number] = self.elsewhere(number)
        gone = () if self.enters else self.entering
        gone += () if self.ends else self.leaving
        for name in gone:
            module = getattr(self, name, None)
            if module is not None and not any(module is one for one in shared):
                setattr(self, name, None)

    def elsewhere(self, layer: int) -> Module:
        """What stands in the place of a layer that another stage has."""
        return Elsewhere()

    def came(self, step: StepContext) -> Tensor:
        """What the stage before has made of the step's tokens, [T, S]."""
        assert step.intermediate is not None, "a later stage goes on from the one before"
        return step.intermediate[STREAM]
