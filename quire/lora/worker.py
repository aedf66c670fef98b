# SPDX-License-Identifier: Apache-2.0
"""Adapters of one worker: the store on the host, the slots on the device, and the rows that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quire.config import EngineConfig
from quire.layers.base import DTYPES, model_dtype
from quire.layers.shard import Shard
from quire.lora.row_adapters import RowAdapters
from quire.lora.store import AdapterSlots, AdapterStore
from quire.lora.targets import Targets
from quire.models.base import CausalLM
from quire.models.stages import Stage
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
