"""The worker: one model on one device, from loading to the last step.

Invariant: memory is taken in this order and never again: weights, warm-up, KV cache. What a device is like
comes from a `Device`; nothing here asks which one it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Protocol

import torch

from quire.config import EngineConfig
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVMemory
from quire.layers.attention import allocate_kv_cache, bind_kv_cache, kv_cache_specs
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MIB = 2**20


class Device(Protocol):
    """Facts and settings of one kind of device."""

    torch_device: torch.device
    default_cache_bytes: int | None
    """Most that the KV cache takes unless it is asked for; None: no limit but the memory."""
    warm_up_tokens: int
    """Length of the warm-up forward pass."""

    def start(self, config: EngineConfig) -> None:
        """Prepare the device for this process."""

    def available_bytes(self) -> int:
        """Memory that is free now."""


class Worker:
    """Loads a model, sizes and allocates its KV cache, and runs steps.

    Args:
        config: prepared.
    """

    def __init__(self, config: EngineConfig, device: Device) -> None:
        self._config = config
        self._device = device
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None

    def load(self) -> None:
        """Load the weights and run the model once.

        Raises:
            StartupError: the checkpoint cannot be loaded.
        """
        started = time.monotonic()
        self._device.start(self._config)
        self._model = load_model(self._config)
        loaded = time.monotonic()
        self._warm_up()
        logger.info(
            "model loaded in %.2f s, warmed up in %.2f s", loaded - started, time.monotonic() - loaded
        )

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        """Layer name -> what it needs of the cache."""
        return kv_cache_specs(self._loaded())

    def kv_memory(self) -> KVMemory:
        """What the cache may take of the memory that is free now."""
        share, free = self._config.cache.gpu_memory_utilization, self._device.available_bytes()
        reason = f"{share:.0%} of the {free / MIB:.0f} MiB that are free after loading"
        return KVMemory(int(share * free), reason, self._device.default_cache_bytes)

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        """Allocate the cache and be ready for steps."""
        self._allocate(kv_config)
        self._runner = ModelRunner(self._loaded(), self._config, kv_config, self._device.torch_device)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        assert self._runner is not None, "execute_model before initialize_kv_cache"
        return self._runner.execute_model(plan)

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self._model = self._runner = None

    def _loaded(self) -> CausalLM:
        assert self._model is not None, "load() comes first"
        return self._model

    def _allocate(self, kv_config: KVCacheConfig) -> None:
        tensors = allocate_kv_cache(kv_config, self._device.torch_device)
        bind_kv_cache(self._loaded(), kv_config, tensors)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run one short prompt, in a cache of its own, so that threads and kernels exist when memory is measured."""
        block_size = self._config.cache.block_size
        limits = (self._config.model.max_model_len, self._config.scheduler.max_num_batched_tokens)
        num_tokens = min(self._device.warm_up_tokens, *limits)
        num_blocks = -(-num_tokens // block_size)
        specs = self.kv_cache_specs()
        one_group = KVCacheGroup(tuple(specs), next(iter(specs.values())))
        self._allocate(KVCacheConfig(num_blocks, (one_group,), specs))
        with self._device.torch_device:
            positions = torch.arange(num_tokens)
            metadata = AttentionMetadata(
                query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
                seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
                block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
                slot_mapping=positions,
                max_query_len=num_tokens,
                max_seq_len=num_tokens,
            )
        model = self._loaded()
        hidden = model.forward(torch.zeros_like(positions), positions, (metadata,))
        model.compute_logits(hidden[-1:])
