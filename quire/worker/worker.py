"""The worker: one model on one device, from loading to the last step.

Invariant: memory is taken in this order and never again: weights, warm-up, KV cache. What a device is like
comes from a `Device`; nothing here asks which one it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kv_cache.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVMemory, SwapCosts
from quire.layers.attention import allocate_kv_cache, bind_kv_cache, kv_cache_specs
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.worker.block_copies import BlockCopier
from quire.worker.model_runner import Forward, ModelRunner

logger = logging.getLogger(__name__)

MIB = 2**20
_COPIED_BYTES = 8 * MIB


class Device(Protocol):
    """Facts and settings of one kind of device."""

    torch_device: torch.device
    default_cache_bytes: int | None
    """Most that the KV cache takes unless it is asked for; None: no limit but the memory."""
    warm_up_tokens: int
    """Length of the warm-up forward pass."""
    is_host: bool
    """Whether its memory is the host's, of which the swap space takes a part."""

    def start(self, config: EngineConfig) -> None:
        """Prepare the device for this process."""

    def available_bytes(self) -> int:
        """Memory that is free now."""

    def forward(self, model: CausalLM, config: EngineConfig, kv_config: KVCacheConfig) -> Forward:
        """How the runner is to run a model whose cache is bound."""


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
        self._copier: BlockCopier | None = None
        self._tokens_per_s = 0.0

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
        if self._device.is_host:
            free = max(0, free - self._config.cache.swap_space_bytes)
        reason = f"{share:.0%} of the {free / MIB:.0f} MiB that are free after loading"
        return KVMemory(int(share * free), reason, self._device.default_cache_bytes, self._swap_costs())

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        """Allocate the cache and be ready for steps."""
        model = self._loaded()
        tensors = self._allocate(kv_config)
        self._copier = BlockCopier(tensors, _host_tier(tensors, kv_config.num_host_blocks))
        forward = self._device.forward(model, self._config, kv_config)
        self._runner = ModelRunner(model, self._config, kv_config, self._device.torch_device, forward)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        assert self._runner is not None, "execute_model before initialize_kv_cache"
        assert self._copier is not None
        self._copier.execute(plan)
        return self._runner.execute_model(plan)

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self._model = self._runner = self._copier = None

    def _loaded(self) -> CausalLM:
        assert self._model is not None, "load() comes first"
        return self._model

    def _swap_costs(self) -> SwapCosts:
        """Rates of copying and computing, roughly: a copy of a few MiB, and the warm-up pass."""
        blocks = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=self._device.torch_device)
        started = time.perf_counter()
        blocks.to("cpu", copy=True)
        return SwapCosts(_COPIED_BYTES / (time.perf_counter() - started), self._tokens_per_s)

    def _allocate(self, kv_config: KVCacheConfig) -> tuple[Tensor, ...]:
        tensors = allocate_kv_cache(kv_config, self._device.torch_device)
        bind_kv_cache(self._loaded(), kv_config, tensors)
        return tensors

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
        started = time.perf_counter()
        hidden = model.forward(torch.zeros_like(positions), positions, (metadata,))
        model.compute_logits(hidden[-1:])
        self._tokens_per_s = num_tokens / (time.perf_counter() - started)


def _host_tier(tensors: Sequence[Tensor], num_blocks: int) -> tuple[Tensor, ...]:
    """Host memory for as many blocks of each tensor, beside a null block; untouched pages cost no memory."""
    return tuple(torch.empty((2, num_blocks + 1, tensor.shape[2]), dtype=tensor.dtype) for tensor in tensors)
