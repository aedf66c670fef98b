"""Where adapters are on the device: a few slots, of which each row of a step names one.

Invariant: a slot's memory stays where it is, so what was recorded of a step is true for every adapter; a slot changes
between steps only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.lora import LoraStacks, SlotMemory
from quire.layers.own_rows import OwnOutputs, OwnRows
from quire.lora.checkpoint import Adapter
from quire.lora.targets import Targets


class AdapterSlots:
    """Slots for adapters in all layers that can have one; they begin empty.

    Args:
        targets: of the loaded model, whose layers get the slots.
        num_slots: adapters that may be in one step.
        max_rank: the largest rank that they may have.
        dtype: of their matrices, as far as layers can have them so.
        upload: brings a tensor of the host to the device, in the order of the device's work.
        max_rows: rows of its own that an adapter may have in each table.
        row_dtype: of these; None: that of matrices.
    """

    def __init__(
        self,
        targets: Targets,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        upload: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        *,
        max_rows: int = 0,
        row_dtype: torch.dtype | None = None,
    ) -> None:
        self._upload = upload
        self._layers = targets.layers
        self._stacks: dict[int, LoraStacks] = {}
        self._filled: list[set[int]] = [
            set() for _ in range(num_slots)
        ]  # layers in which a slot has something
        self._rows: dict[int, OwnRows | OwnOutputs] = {}
        memory = SlotMemory(device)
        for index, own in enumerate(self._layers):
            if not own.is_here:
                continue
            self._stacks[index] = own.make_room(num_slots, max_rank, own.kept(dtype), memory)
            rows = own.give_rows(num_slots, max_rows, row_dtype or dtype, device) if max_rows else None
            if rows is not None:
                self._rows[index] = rows

    def put(self, slot: int, adapter: Adapter) -> None:
        """Let a slot be this adapter; whatever it was before is forgotten. All ranks do so at once."""
        adapter.settle()
        left, self._filled[slot] = self._filled[slot], {*adapter.layers}
        for index in sorted(left | self._filled[slot]):
            own, stacks = self._layers[index], self._stacks[index]
            source, blocks = adapter.layers.get(index), slice(slot * own.blocks, (slot + 1) * own.blocks)
            if source is None:
                stacks.ranks[blocks] = 0
                stacks.affine[blocks] = 0
                if stacks.input_factors is not None:
                    stacks.input_factors[blocks] = 1.0
                continue
            rank = source.b.shape[1]
            stacks.a[blocks, ..., :rank] = self._upload(source.a)
            if own.is_table:  # all ranks of a row are looked up, and what is no number would spread
                stacks.a[blocks, ..., rank:] = 0.0
            stacks.b[blocks, :rank] = self._upload(source.b)
            stacks.scales[blocks, :, :rank] = self._upload(source.scales)
            stacks.ranks[blocks] = self._upload(source.ranks)
            stacks.affine[blocks] = self._upload(source.affine)
            if stacks.input_factors is not None and source.input_factors is not None:
                stacks.input_factors[blocks] = self._upload(source.input_factors)
            if source.affine.any():
                stacks.factors[blocks] = self._upload(source.factors)
                stacks.offsets[blocks] = self._upload(source.offsets)
        for index, rows in self._rows.items():
            rows.put(slot, adapter.rows.get(index), self._upload)

    def launch(self) -> None:
        """Launch each layer's kernel over a row without an adapter, so that it is compiled, where kernels are."""
        for index, stacks in self._stacks.items():
            row = torch.full((1,), -1, dtype=torch.int32, device=stacks.a.device)
            self._layers[index].launch(stacks, row)
        for rows in self._rows.values():
            rows.launch(row)

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return sum(part.nbytes for part in (*self._stacks.values(), *self._rows.values()))
