# SPDX-License-Identifier: Apache-2.0
"""Layer stack with the modules that only the first or the last pipeline stage has.

Shapes: T tokens of the step, S features passed from one stage to the next, as [T, S].
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
"""Key of `StepContext.intermediate`: output [T, S] of the previous stages' layers."""


class OtherStageLayer(Module):
    """Placeholder for a layer of another stage."""


class Stack(Module):
    """Base of the model body below the head: computes `layers[own]` and the end modules of its stage."""

    entering: tuple[str, ...] = ("embed_tokens", "embed_positions", "embed_norm")
    """Modules of the first stage only; a tied embedding is in the last stage, too."""
    leaving: tuple[str, ...] = ("norm",)
    """Modules of the last stage only."""
    takes_media = False
    """True if rows of the first stage can take embeddings of media (`StepContext.media`)."""
    layers: nn.ModuleList

    def __init__(self, *, config: EngineConfig) -> None:
        super().__init__()
        self.enters = self.ends = True
        self.own = range(config.arch.num_layers)
        """Numbers of the layers of this stage."""
        self._hidden_size = config.arch.hidden_size

    def own_layers(self) -> Iterator[tuple[int, Any]]:
        """Yield (number, layer) of this stage, in order."""
        return islice(enumerate(self.layers), self.own.start, self.own.stop)

    def joined(self) -> Collection[int]:
        """Return the numbers of layers that must share a stage with the layer before them."""
        return ()

    def stream_size(self, layer: int) -> int:
        """Return the number of input features of a layer that begins a stage."""
        return self._hidden_size

    def end_modules(self, names: Collection[str]) -> list[nn.Module]:
        """Return those of `entering` or `leaving` that the model has."""
        found = (getattr(self, name, None) for name in names)
        return [module for module in found if isinstance(module, nn.Module)]

    def apply_stage(self, own: range, shared: Collection[nn.Module]) -> None:
        """Drop everything but some contiguous layers and their end modules; called once, if at all.

        `shared` are modules of another stage that this one needs, too.
        """
        self.enters, self.ends, self.own = own.start == 0, own.stop == len(self.layers), own
        for number in range(len(self.layers)):
            if number not in own:
                self.layers[number] = self.placeholder(number)
        gone = () if self.enters else self.entering
        gone += () if self.ends else self.leaving
        for name in gone:
            module = getattr(self, name, None)
            if module is not None and not any(module is one for one in shared):
                setattr(self, name, None)

    def placeholder(self, layer: int) -> Module:
        """Return the placeholder for a layer of another stage."""
        return OtherStageLayer()

    def received(self, step: StepContext) -> Tensor:
        """Return the previous stage's output for the step's tokens, [T, S]."""
        assert step.intermediate is not None, "a later stage needs the previous stage's output"
        return step.intermediate[STREAM]
