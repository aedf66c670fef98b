# SPDX-License-Identifier: Apache-2.0
"""Adapter and slot of each row of the batch.

Invariant: a slot is not reassigned while a row uses its adapter; a plan has no more different adapters than slots.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from quire.errors import EngineError
from quire.lora.store import AdapterSlots, AdapterStore
from quire.lora_request import LoRARequest
from quire.scheduler.output import NewRequestData


class RowAdapters:
    """Assigns adapters to slots when rows need them.

    Args:
        store: store of the adapters that plans name.
        slots: the `num_slots` slots that steps read.
    """

    def __init__(self, store: AdapterStore, slots: AdapterSlots, num_slots: int, num_rows: int) -> None:
        self._store = store
        self._slots = slots
        self._free = list(reversed(range(num_slots)))
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # by adapter, least recently used first
        self._of_rows: NDArray[np.int32] = np.full(num_rows, -1, dtype=np.int32)
        self._num_added: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.add_tokens = False
        """True once any row has had an adapter with added tokens."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Assign a row to a request, with or without an adapter.

        Raises:
            EngineError: rows need more adapters than there are slots.
        """
        adapter = request.lora_request
        self._of_rows[row] = -1 if adapter is None else self._slot(adapter)
        self._num_added[row] = added = self.num_added_of(request)
        self.add_tokens |= added > 0

    def remove_request(self, row: int) -> None:
        """Free a row."""
        self._of_rows[row] = -1

    def num_added(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of added tokens of each of these rows."""
        return self._num_added[rows]

    def num_added_of(self, request: NewRequestData) -> int:
        """Return the number of tokens that a request's adapter adds; the store has it."""
        adapter = request.lora_request
        return 0 if adapter is None else self._store.get(adapter).num_added

    def slots_of(self, rows: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """Return the slot of each row, negative without an adapter; None if no row has one."""
        slots = self._of_rows[rows]
        return slots if slots.max(initial=-1) >= 0 else None

    def _slot(self, request: LoRARequest) -> int:
        slot = self._slot_of.get(request.key)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
            self._slots.put(slot, self._store.get(request))
            self._slot_of[request.key] = slot
        self._slot_of.move_to_end(request.key)
        return slot

    def _evict(self) -> int:
        """Free the slot of the least recently used adapter without a row."""
        used = {*self._of_rows.tolist()}
        for key, slot in self._slot_of.items():
            if slot not in used:
                del self._slot_of[key]
                return slot
        raise EngineError(f"the plan has more adapters than max_loras ({len(self._slot_of)})")
