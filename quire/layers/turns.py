# SPDX-License-Identifier: Apache-2.0
"""Model layers that take turns at one shared linear layer."""

from dataclasses import dataclass, field

from quire.kernels.low_rank import SharedStacks


@dataclass(frozen=True)
class LayerTurns:
    """Model layers that take turns at one shared linear layer; adapters treat them as separate.

    In a turn, adapter rows are counted from that turn's slots on.
    """

    layers: tuple[int, ...]
    """Layer numbers; the checkpoint stores the layer at `home`."""
    home: int
    idle: tuple[int, ...] = ()
    """Layer numbers at which the model has the layer but never calls it."""
    slots: SharedStacks = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", SharedStacks(range(len(self.layers))))

    def name_at(self, layer: int, name: str) -> str:
        """Return the layer's name at that layer number."""
        return name.replace(f".layers.{self.home}.", f".layers.{layer}.", 1)
