# SPDX-License-Identifier: Apache-2.0
"""Adapters of one worker: the store on the host, the slots on the device, and the rows that use them.

Invariant: a slot is not reassigned while a row uses its adapter; a plan has no more different adapters than slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.errors import EngineError
from quire.layers.base import DTYPES, model_dtype
from quire.layers.shard import Shard
from quire.lora.store import AdapterSlots, AdapterStore
from quire.lora.targets import Targets
from quire.models.base import CausalLM
from quire.models.stages import Stage
from quire.scheduler.output import NewRequestData
from quire.worker.devices import Device
from quire.worker.feature import WorkerFeature
from quire.worker.input_batch import InputBatch

_DTYPES = DTYPES | {"int8": torch.int8}


def lora_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of LoRA weights; the config must be prepared."""
    return _DTYPES.get(config.lora.lora_dtype, model_dtype(config))


class WorkerAdapters(WorkerFeature):
    """LoRA adapters that requests name."""

    def __init__(self, config: EngineConfig, device: Device, shard: Shard, stage: Stage) -> None:
        super().__init__(config, device, shard, stage)
        self.store = AdapterStore(
            config.lora.max_lora_rank,
            lora_dtype(config),
            row_dtype=model_dtype(config),
            max_rows=config.lora.lora_extra_vocab_size,
            max_added=config.max_added_tokens,
            base_model=config.model.model,
            settings=config.lora,
        )
        self._slots: AdapterSlots | None = None

    @classmethod
    def is_wanted(cls, config: EngineConfig) -> bool:
        return config.lora.enable_lora

    @property
    def calls(self) -> Mapping[str, Callable[..., Any]]:
        return {"prepare_adapter": self.store.prepare, "drop_adapter": self.store.drop}

    def load(self, model: CausalLM) -> None:
        """Allocate slots in the layers of a model."""
        config, lora, transfers = self._config, self._config.lora, self._device.transfers
        targets = Targets(model)
        self._slots = AdapterSlots(
            targets,
            lora.max_loras,
            lora.max_lora_rank,
            lora_dtype(config),
            transfers.torch_device,
            transfers.upload,
            max_rows=lora.lora_extra_vocab_size,
            row_dtype=model_dtype(config),
        )
        self.store.use_targets(targets)

    def unload(self) -> None:
        self._slots = None

    def launch_kernels(self) -> None:
        if self._slots is not None:
            self._slots.launch()

    def attach(self, batch: InputBatch) -> None:
        if self._slots is not None:
            batch.adapters = RowAdapters(
                self.store, self._slots, self._config.lora.max_loras, batch.max_num_seqs
            )

    def close(self) -> None:
        self.store.close()


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
        adapter = request.adapter_request
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
        adapter = request.adapter_request
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
