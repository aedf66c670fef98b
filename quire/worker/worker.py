"""The worker: one model on one device, from loading to the last step.

Invariant: memory is taken in this order and never again: weights, warm-up, KV cache. What a device is like
comes from a `Device`; nothing here asks which one it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVMemory, SwapCosts
from quire.layers.kv_cache import allocate_kv_cache, bind_kv_cache, kv_cache_specs
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.structured_output.store import GrammarStore
from quire.worker.block_copies import BlockCopier
from quire.worker.devices import Device
from quire.worker.model_runner import ModelRunner
from quire.worker.rehearsal import Rehearsal, rehearsed_groups

logger = logging.getLogger(__name__)

_COPIED_BYTES = 8 * 2**20


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
        self.grammars = GrammarStore(config.structured_outputs.settings)

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
        usable, reason = self._device.memory.usable_bytes(self._config)
        return KVMemory(usable, reason, self._device.memory.default_cache_bytes, self._swap_costs())

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        """Allocate the cache and be ready for steps."""
        tensors, transfers = self._bind_cache(kv_config), self._device.transfers
        shapes = [(kv_config.num_host_blocks + 1, tensor.shape[1]) for tensor in tensors]
        host_tier = [transfers.host_memory(shape) for shape in shapes]
        self._copier = BlockCopier(tensors, host_tier, transfers.copy_blocks)
        self._runner = ModelRunner(
            self._loaded(), self._config, kv_config, self._device, grammars=self.grammars
        )
        self._runner.prepare()

    def submit(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Run one step, or hand it to a device that goes on by itself; returns what waits for the result."""
        assert self._runner is not None, "submit before initialize_kv_cache"
        assert self._copier is not None
        self._copier.execute(plan)
        step = self._runner.launch(plan)
        if not self._device.is_asynchronous:
            step.result()
        return step.result

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self._model = self._runner = self._copier = None
        self.grammars.close()

    def _loaded(self) -> CausalLM:
        assert self._model is not None, "load() comes first"
        return self._model

    def _swap_costs(self) -> SwapCosts:
        """Rates of copying and computing, roughly: a copy of a few MiB, and the step of prompts that warmed up."""
        blocks = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=self._device.transfers.torch_device)
        started = time.perf_counter()
        blocks.to("cpu", copy=True)
        return SwapCosts(_COPIED_BYTES / (time.perf_counter() - started), self._tokens_per_s)

    def _bind_cache(self, kv_config: KVCacheConfig) -> tuple[Tensor, ...]:
        """Allocate a cache, and give it to the model."""
        tensors = allocate_kv_cache(kv_config, self._device.transfers.torch_device)
        bind_kv_cache(self._loaded(), kv_config, tensors)
        return tensors

    def _warm_up(self) -> None:
        """Run the largest steps in a cache of their own, so that all that they need exists when memory is measured."""
        device, memory, specs = self._device, self._device.memory, self.kv_cache_specs()
        groups = rehearsed_groups(specs)
        rehearsal = Rehearsal(self._config, memory.warm_up_tokens, memory.warm_up_seqs, len(groups))
        cache = KVCacheConfig(rehearsal.num_blocks, groups, specs)
        self._bind_cache(cache)
        with memory.rehearsal():
            runner = ModelRunner(self._loaded(), self._config, cache, device, is_rehearsal=True)
        for plan in rehearsal.plans():
            started = time.perf_counter()
            with memory.rehearsal():
                runner.execute_model(plan)
            rate = plan.total_num_scheduled_tokens / (time.perf_counter() - started)
            self._tokens_per_s = max(self._tokens_per_s, rate)
        self._bind_cache(KVCacheConfig(1, groups, specs))  # lets go of the larger one
