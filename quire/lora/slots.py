"""Where adapters are on the device: a few slots, of which each row of a step names one.

Invariant: a slot's memory stays where it is, so what was recorded of a step is true for every adapter; a slot changes
between steps only.
"""

from __future__ import annotations

import torch

from quire.kernels.lora import LoraStacks
from quire.lora.checkpoint import Adapter
from quire.lora.targets import Targets


class AdapterSlots:
    """Slots for adapters in all layers that can have one; they begin empty.

    Args:
        targets: of the loaded model, whose layers get the slots.
        num_slots: adapters that may be in one step.
        max_rank: the largest rank that they may have.
        dtype: of their weights.
    """

    def __init__(
        self, targets: Targets, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stacks: list[LoraStacks] = []
        for own in targets.layers:
            inputs = own.layer.columns.stop - own.layer.columns.start
            stacks = LoraStacks.empty(num_slots, own.parts, inputs, max_rank, dtype, device)
            own.layer.adapters = stacks
            self._stacks.append(stacks)

    def put(self, slot: int, adapter: Adapter) -> None:
        """Let a slot be this adapter; whatever it was before is forgotten."""
        for index, stacks in enumerate(self._stacks):
            source = adapter.layers.get(index)
            if source is None:
                stacks.ranks[slot] = 0
                continue
            rank = source.b.shape[1]
            stacks.a[slot, ..., :rank] = source.a[0]
            stacks.b[slot, :rank] = source.b[0]
            stacks.scales[slot] = source.scales[0]
            stacks.ranks[slot] = source.ranks[0]

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return sum(stacks.nbytes for stacks in self._stacks)
