# SPDX-License-Identifier: Apache-2.0
"""One model on one device, from loading to the last step.

Invariant: memory is allocated in this order and never again: weights, warm-up, KV cache. Device specifics come from
`Device`; nothing here asks for the device type.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.features import MEDIA_ENCODER, WORKER_EXTENSION
from quire.kv_cache.rows import RowMover
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVMemory, SwapCosts, fit_states
from quire.layers.experts import take_part
from quire.layers.kv_cache import allocate_kv_cache, bind_kv_cache, kv_cache_specs
from quire.layers.shard import WHOLE, Shard
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.models.stages import ALL, Stage
from quire.plugins import import_place
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.worker.block_copies import BlockCopier
from quire.worker.calibration import Rehearsal, rehearsed_groups
from quire.worker.devices import Device
from quire.worker.feature import WorkerFeature, worker_features
from quire.worker.launched_step import LaunchedStep
from quire.worker.media_rows import MediaBatch, MediaEncoder
from quire.worker.model_runner import ModelRunner
from quire.worker.stage_sizes import resolve_stage_sizes

logger = logging.getLogger(__name__)

_TRIED = "you tried to allocate"  # part of the RuntimeError that torch's CPU allocator raises
_COPIED_BYTES = 8 * 2**20  # size of the copy that measures the swap rate


@contextmanager
def refused_memory(purpose: str, remedy: str) -> Iterator[None]:
    """Turn a failed allocation into a StartupError; any other error passes through.

    Raises:
        StartupError: names the purpose, the size and the flags that reduce it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = str(error)
        if isinstance(error, RuntimeError) and _TRIED not in reason:
            raise
        tried = (
            reason[reason.index(_TRIED) :].split(".")[0] if _TRIED in reason else "Python's allocator failed"
        )
        raise StartupError(f"not enough memory for {purpose} ({tried}); {remedy}") from error


class StepWorker:
    """Base of `Worker`: loads a model, sizes and allocates its KV cache, and runs steps.

    Args:
        config: prepared.
        shard: tensor-parallel shard of each layer; the draft model is not sharded.
        stage: pipeline stage, which decides the layers.
    """

    def __init__(
        self, config: EngineConfig, device: Device, shard: Shard = WHOLE, stage: Stage = ALL
    ) -> None:
        self._config = config.on_torch_device(device.transfers.torch_device.type)
        self._device = device
        self._shard = shard
        self._stage = stage
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self._copier: BlockCopier | None = None
        self._rows: RowMover | None = None
        self._encoder: MediaEncoder | None = None
        self._tokens_per_s = 0.0
        self._kv_config: KVCacheConfig | None = None
        self.features: dict[str, WorkerFeature] = worker_features(self._config, device, shard, stage)
        """Features by their names in `quire.features.WORKER_FEATURES`."""
        self.calls: dict[str, Callable[..., Any]] = {
            name: call for feature in self.features.values() for name, call in feature.calls.items()
        }
        """Functions of features for the executor."""
        self.extension: Any = None
        self.note_loading: Callable[..., None] = lambda *progress: None  # See `Executor.note_loading`.
        self._tensors: tuple[Tensor, ...] = ()  # KV cache of the runner.

    def load(self) -> None:
        """Load the weights and run the model once.

        Raises:
            StartupError: the checkpoint cannot be loaded, or the machine has no memory for it.
        """
        started = time.monotonic()
        if self._config.training.worker_extension_cls:
            self.extension = import_place(WORKER_EXTENSION)(self)
        self._device.start(self._config)
        with refused_memory("the model", "reduce it with --max-model-len, --dtype or --quantization"):
            self._stage = resolve_stage_sizes(self._config, self._shard, self._stage)
            self._load_model()
            loaded = time.monotonic()
            self.note_loading("warm_up")
            self._warm_up()
        logger.info(
            "model loaded in %.2f s, warmed up in %.2f s", loaded - started, time.monotonic() - loaded
        )

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        """Return each layer's KV cache spec by layer name."""
        return kv_cache_specs(self._models())

    def kv_memory(self) -> KVMemory:
        """Return the memory that the KV cache may take of what is free now."""
        memory = self._device.memory
        usable, reason = memory.usable_bytes(self._config)
        return KVMemory(usable, reason, memory.unasked_bytes(self._config), self._swap_costs())

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        """Allocate the KV cache of this stage's layers and build the model runner.

        Raises:
            StartupError: not enough memory.
        """
        kv_config = self._kv_config = kv_config.of_layers(self.kv_cache_specs())
        with refused_memory("the KV cache", "reduce --kv-cache-memory-bytes or --swap-space"):
            self._tensors, transfers = self._bind_cache(kv_config), self._device.transfers
            shapes = [(kv_config.num_host_blocks + 1, tensor.shape[1]) for tensor in self._tensors]
            host_tier = [transfers.host_memory(shape) for shape in shapes]
        self._copier = BlockCopier(self._tensors, host_tier, transfers.copy_blocks)
        if self._rows is not None:
            self._rows.use(host_tier, self._tensors)
        self._make_runner(kv_config)

    def _make_runner(self, kv_config: KVCacheConfig, *, writes_cache: bool = True) -> None:
        """Build the model runner over a bound KV cache, to whose blocks it may write before the first step."""
        self._runner = ModelRunner(
            self._loaded(),
            self._config,
            kv_config,
            self._device,
            features=self.features.values(),
            media=self._media_batch(),
            stage=self._stage,
        )
        self._runner.prepare()
        if writes_cache:
            self._runner.calibrate()

    def submit(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Launch one step and return a function that waits for its result.

        An asynchronous device computes after the call has returned. The result of a stage before the last carries no
        tokens; it only says that the last stage has finished.
        """
        assert self._runner is not None, "submit before initialize_kv_cache"
        assert self._copier is not None
        self._copier.execute(plan)
        with self._device.step():
            step = self._runner.launch(plan)
            if plan.scheduled and not step.request_ids:
                self.take_part()  # other replicas wait for this step's expert exchange
            if self._stage.is_last and not self._device.is_asynchronous:
                step.result()
        return step.result if self._config.parallel.num_ranks == 1 else partial(self._result, step)

    def _result(self, step: LaunchedStep) -> ModelRunnerOutput:
        """Wait for the result; if a rank of either group is lost, raise that error in place of its consequences."""
        try:
            return step.result()
        finally:
            for group in (self._shard.group, self._stage.group):
                group.check_all_alive()

    @torch.inference_mode()
    def take_part(self) -> None:
        """Run the experts for tokens of other replicas only, if replicas share experts."""
        if self._config.parallel.shares_experts:
            take_part(self._loaded())

    def shutdown(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self._model = self._runner = self._copier = self._encoder = None
        for feature in self.features.values():
            feature.close()

    def _load_model(self) -> None:
        """Load the model, and what features add to it."""
        note = partial(self.note_loading, "weights")
        self._model = load_model(self._config, self._shard, self._stage, note=note)
        if self._model.takes_media and self._stage.is_first and self._encoder is None:
            self._encoder = import_place(MEDIA_ENCODER)(self._config)
        for feature in self.features.values():
            feature.load(self._model)

    def _media_batch(self) -> MediaBatch | None:
        """Return the media of the runner's rows, if the model takes some."""
        arch = self._config.arch
        if not self._loaded().takes_media:
            return None
        whole = arch.part_of
        return MediaBatch(
            self._encoder,
            self._config.scheduler.max_num_seqs,
            hidden_size=arch.media_size,
            num_deepstack=0 if whole is None else whole.deepstack_layers,
            has_axes=whole is not None and bool(whole.rope_sections),
            max_position=self._config.model.max_model_len,
            tokens_per_second=1.0 if whole is None else whole.tokens_per_second,
            encodes=whole is not None and whole.encoder_length > 0,
            encodes_any_length=whole is not None and whole.reads_text,
        )

    @property
    def config(self) -> EngineConfig:
        """Configuration, with the directory of the weights in use."""
        return self._config

    def _loaded(self) -> CausalLM:
        assert self._model is not None, "load() comes first"
        return self._model

    def _models(self) -> nn.ModuleList:
        """Return all models whose layers share the KV cache."""
        further = (model for feature in self.features.values() for model in feature.models)
        return nn.ModuleList([self._loaded(), *further])

    def _swap_costs(self) -> SwapCosts:
        """Estimate the rates of copying (one copy of a few MiB) and of prefill (the warm-up steps)."""
        blocks = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=self._device.transfers.torch_device)
        started = time.perf_counter()
        blocks.to("cpu", copy=True)
        return SwapCosts(_COPIED_BYTES / (time.perf_counter() - started), self._tokens_per_s)

    def _bind_cache(self, kv_config: KVCacheConfig) -> tuple[Tensor, ...]:
        """Allocate a KV cache and bind it to the models."""
        with enough_memory(f"a KV cache of {kv_config.bytes / 2**20:.0f} MiB"):
            tensors = allocate_kv_cache(kv_config, self._device.transfers.torch_device)
        bind_kv_cache(self._models(), kv_config, tensors)
        return tensors

    def _warm_up(self) -> None:
        """Run the largest steps with a temporary KV cache, so that everything they allocate exists when memory is
        measured.
        """
        device, memory = self._device, self._device.memory
        minimal = self._minimal_cache()
        rehearsal = Rehearsal(
            self._config,
            memory.warm_up_tokens,
            memory.warm_up_seqs,
            minimal.groups,
            every_variant=device.compiles_kernels,
        )
        cache = replace(minimal, num_blocks=rehearsal.num_blocks)
        tensors = self._bind_cache(cache)
        if device.compiles_kernels:
            self._compile_remaining_kernels(tensors)
        features = self.features.values()
        for model in (model for feature in features for model in feature.rehearsed_models):
            self._rehearse(model, rehearsal, cache)
        self._tokens_per_s = self._rehearse(self._loaded(), rehearsal, cache, self._stage, features)
        self._bind_minimal_cache()

    def _rehearse(
        self,
        model: CausalLM,
        rehearsal: Rehearsal,
        cache: KVCacheConfig,
        stage: Stage = ALL,
        features: Iterable[WorkerFeature] = (),
    ) -> float:
        """Run the rehearsal steps of a model, with parts of features; return the highest tokens per second."""
        memory, best = self._device.memory, 0.0
        # The vocabulary of a draft model may differ in size from its target's.
        arch = replace(self._config.arch, vocab_size=model.config.arch.vocab_size)
        config = replace(self._config, model_arch=arch)
        with memory.rehearsal():
            runner = ModelRunner(
                model, config, cache, self._device, features=features, stage=stage, is_rehearsal=True
            )
        for plan in rehearsal.plans():
            started = time.perf_counter()
            with memory.rehearsal():
                runner.execute_model(plan)
            best = max(best, plan.total_num_scheduled_tokens / (time.perf_counter() - started))
        with memory.rehearsal():
            runner.prepare()
        return best

    def _compile_remaining_kernels(self, cache: tuple[Tensor, ...]) -> None:
        """Launch the kernels that no plan reaches: block copies, and those of features."""
        self._device.transfers.copy_blocks(cache, cache, [(0, 1)])
        for feature in self.features.values():
            feature.launch_kernels()

    def _bind_minimal_cache(self) -> None:
        """Release the KV cache by binding one of a single block."""
        self._bind_cache(self._minimal_cache())

    def _minimal_cache(self) -> KVCacheConfig:
        """Return a cache config of the null block only, with the groups of a rehearsal."""
        specs = fit_states(self.kv_cache_specs())
        return KVCacheConfig(1, rehearsed_groups(specs), specs)


_REFUSED_ALLOCATION = "DefaultCPUAllocator"
"""In torch's message if the system has no memory; the rest of it are numbers that the caller's message has."""


@contextmanager
def enough_memory(purpose: str) -> Iterator[None]:
    """Raise StartupError for a RuntimeError; inside such a block only a failed allocation raises one."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error)
        if _REFUSED_ALLOCATION in reason:
            reason = "the system refuses to allocate it; give a smaller --kv-cache-memory-bytes, or --max-model-len"
        raise StartupError(f"not enough memory for {purpose}: {reason}") from error
