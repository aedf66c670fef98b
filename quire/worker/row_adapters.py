"""Which adapter each row of the batch has, and in which slot of the device it is.

Invariant: a slot whose adapter some row has keeps it; the plan has no more different adapters than there are slots.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from quire.errors import EngineError
from quire.lora.slots import AdapterSlots
from quire.lora.store import AdapterStore
from quire.lora_request import LoRARequest


class RowAdapters:
    """Puts adapters into slots when rows need them, and gives the slots of rows.

    Args:
        store: has the adapters that plans name.
        slots: `num_slots` of them, into whose place in memory steps look.
    """

    def __init__(self, store: AdapterStore, slots: AdapterSlots, num_slots: int, num_rows: int) -> None:
        self._store = store
        self._slots = slots
        self._free = list(reversed(range(num_slots)))
        self._slot_of: OrderedDict[str, int] = (
            OrderedDict()
        )  # by adapter, the one that was wanted longest ago first
        self._of_rows: NDArray[np.int32] = np.full(num_rows, -1, dtype=np.int32)
        self._num_added: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.add_tokens = False
        """Whether any row has had an adapter with tokens behind the model's."""

    def add_request(self, row: int, request: LoRARequest | None) -> None:
        """A row is a request's, which has this adapter.

        Raises:
            EngineError: rows need more adapters than there are slots.
        """
        self._of_rows[row] = -1 if request is None else self._slot(request)
        self._num_added[row] = added = self.num_added_of(request)
        self.add_tokens |= added > 0

    def remove_request(self, row: int) -> None:
        """A row is nobody's."""
        self._of_rows[row] = -1

    def num_added(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens behind the model's that each of these rows may have."""
        return self._num_added[rows]

    def num_added_of(self, request: LoRARequest | None) -> int:
        """Those that an adapter adds, which the store has."""
        return 0 if request is None else self._store.get(request).num_added

    def slots_of(self, rows: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """The slot of each row, negative for one without an adapter; None if all are."""
        slots = self._of_rows[rows]
        return slots if slots.max(initial=-1) >= 0 else None

    def _slot(self, request: LoRARequest) -> int:
        slot = self._slot_of.get(request.key)
        if slot is None:
            slot = self._free.pop() if self._free else self._take_slot()
            self._slots.put(slot, self._store.get(request))
            self._slot_of[request.key] = slot
        self._slot_of.move_to_end(request.key)
        return slot

    def _take_slot(self) -> int:
        """That of the adapter which no row has for the longest time."""
        used = {*self._of_rows.tolist()}
        for key, slot in self._slot_of.items():
            if slot not in used:
                del self._slot_of[key]
                return slot
        raise EngineError(f"the plan has more adapters than max_loras ({len(self._slot_of)})")
