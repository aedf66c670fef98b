"""The worker: one model on one device, from loading to the last step.

Invariant: memory is taken in this order and never again: weights, warm-up, KV cache; what sleeps gives its own back and
takes as much when it wakes. What a device is like
comes from a `Device`; nothing here asks which one it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.kernels import ops
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVMemory, SwapCosts, fit_states
from quire.layers.base import lora_dtype, model_dtype
from quire.layers.experts import take_part
from quire.layers.kv_cache import allocate_kv_cache, bind_kv_cache, kv_cache_specs
from quire.layers.shard import WHOLE, Shard
from quire.lora.slots import AdapterSlots
from quire.lora.store import AdapterStore
from quire.lora.targets import Targets
from quire.models.base import CausalLM
from quire.models.draft_heads.autoregressive import AutoregressiveHead
from quire.models.loader import load_model
from quire.models.stages import ALL, Stage
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.structured_output.store import GrammarStore
from quire.worker.block_copies import BlockCopier
from quire.worker.calibration import Calibration, is_calibrated, shapes_of
from quire.worker.devices import Device
from quire.worker.drafts import DRAFT_PREFIX
from quire.worker.guessing_memory import guesses_by_states
from quire.worker.launched_step import LaunchedStep
from quire.worker.model_runner import ModelRunner
from quire.worker.parked_weights import ParkedWeights
from quire.worker.refused_memory import refused_memory
from quire.worker.rehearsal import Rehearsal, rehearsed_groups
from quire.worker.row_adapters import RowAdapters
from quire.worker.shared_clocks import all_clocks, clocks_of
from quire.worker.stage_sizes import with_sizes

logger = logging.getLogger(__name__)

_COPIED_BYTES = 8 * 2**20


class Worker:
    """Loads a model, sizes and allocates its KV cache, and runs steps.

    Args:
        config: prepared.
        shard: what this worker computes of each layer; a draft model it computes as a whole.
        stage: of which layers.
    """

    def __init__(
        self, config: EngineConfig, device: Device, shard: Shard = WHOLE, stage: Stage = ALL
    ) -> None:
        self._config = config.on_torch_device(device.transfers.torch_device.type)
        self._device = device
        self._shard = shard
        self._stage = stage
        self._model: CausalLM | None = None
        self._draft: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self._copier: BlockCopier | None = None
        self._tokens_per_s = 0.0
        self._kv_config: KVCacheConfig | None = None
        self._parked: ParkedWeights | None = None
        # Time differs among ranks that must sample the same tokens: one decides for all, or, where each has a
        # scheduler of its own, none.
        limits_time = shard.rank == 0 and not config.parallel.plans_on_each_rank
        self.grammars = GrammarStore(config.structured_outputs.settings, limits_time=limits_time)
        self.adapters = AdapterStore(
            config.lora.max_lora_rank,
            lora_dtype(config),
            row_dtype=model_dtype(config),
            max_rows=config.lora.lora_extra_vocab_size,
            max_added=config.max_added_tokens,
            base_model=config.model.model,
        )
        self._slots: AdapterSlots | None = None

    def load(self) -> None:
        """Load the weights and run the model once.

        Raises:
            StartupError: the checkpoint cannot be loaded, or the machine has no memory for it.
        """
        started = time.monotonic()
        self._device.start(self._config)
        with refused_memory(
            "the model", "--max-model-len, --dtype and --quantization decide how much it takes"
        ):
            self._stage = with_sizes(self._config, self._shard, self._stage)
            self._load_model()
            loaded = time.monotonic()
            self._warm_up()
        logger.info(
            "model loaded in %.2f s, warmed up in %.2f s", loaded - started, time.monotonic() - loaded
        )

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        """Layer name -> what it needs of the cache."""
        return kv_cache_specs(self._models())

    def kv_memory(self) -> KVMemory:
        """What the cache may take of the memory that is free now."""
        memory = self._device.memory
        usable, reason = memory.usable_bytes(self._config)
        return KVMemory(usable, reason, memory.unasked_bytes(self._config), self._swap_costs())

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        """Allocate the cache of this stage's layers, and be ready for steps.

        Raises:
            StartupError: the machine has not so much memory.
        """
        kv_config = self._kv_config = kv_config.of_layers(self.kv_cache_specs())
        with refused_memory("the KV cache", "give it less by --kv-cache-memory-bytes, and less --swap-space"):
            tensors, transfers = self._bind_cache(kv_config), self._device.transfers
            shapes = [(kv_config.num_host_blocks + 1, tensor.shape[1]) for tensor in tensors]
            host_tier = [transfers.host_memory(shape) for shape in shapes]
        self._copier = BlockCopier(tensors, host_tier, transfers.copy_blocks)
        self._runner = ModelRunner(
            self._loaded(),
            self._config,
            kv_config,
            self._device,
            grammars=self.grammars,
            adapters=self._row_adapters(),
            draft=self._draft,
            stage=self._stage,
            clocks=clocks_of(self._config, self._shard.group),
        )
        self._runner.prepare()
        if is_calibrated(self._config, self._stage):
            calibration = Calibration(shapes_of(self._config), kv_config)
            self._runner.calibrate(calibration, all_clocks(self._shard.group))

    def submit(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Run one step, or hand it to a device that goes on by itself; returns what waits for the result.

        Of a stage before the last the result says nothing but that the last has ended its part.
        """
        assert self._runner is not None, "submit before initialize_kv_cache"
        assert self._copier is not None
        self._copier.execute(plan)
        with self._device.step():
            step = self._runner.launch(plan)
            if plan.scheduled and not step.request_ids:
                self.take_part()  # others count on a step
            if self._stage.is_last and not self._device.is_asynchronous:
                step.result()
        return step.result if self._config.parallel.num_ranks == 1 else partial(self._result, step)

    def _result(self, step: LaunchedStep) -> ModelRunnerOutput:
        """A device that has lost another goes on, and whatever comes of that is nobody's error but the loss."""
        try:
            return step.result()
        finally:
            for group in (self._shard.group, self._stage.group):
                group.check_nobody_lost()

    @torch.inference_mode()
    def take_part(self) -> None:
        """Compute for tokens of other replicas alone, if there are any that share experts with this one."""
        if self._config.parallel.shares_experts:
            take_part(self._loaded())

    def sleep(self, level: int) -> None:
        """Give back the cache, and park the weights (level 1) or let go of them (2); rows are lost."""
        if self._runner is not None:
            self._runner.read_all()
            self._runner = self._copier = None
            self._bind_least_cache()
        if level == 2:
            self._model = self._draft = self._parked = self._slots = None
        elif self._model is not None and self._parked is None and self._device.parks_weights:
            models = [self._model] if self._draft is None else [self._model, self._draft]
            self._parked = ParkedWeights(models, self._device.transfers)
        self._device.memory.give_back()

    def wake_up(self, tag: str) -> None:
        """Have the weights, or the cache, again.

        Raises:
            StartupError: they cannot be loaded, or memory does not suffice; they sleep on.
        """
        WAKERS[tag](self)

    def _wake_weights(self) -> None:
        if self._model is None:
            self._load_model()
        if self._parked is not None:
            with _enough_memory("the weights"):
                self._parked.restore()
            self._parked = None

    def _wake_cache(self) -> None:
        assert self._kv_config is not None, "a cache that sleeps was there before"
        self.initialize_kv_cache(self._kv_config)

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self._model = self._draft = self._runner = self._copier = None
        self.grammars.close()
        self.adapters.close()

    def _load_model(self) -> None:
        """The model, with slots for adapters if they are served, and what guesses for it, if anything does."""
        self._model = load_model(self._config, self._shard, self._stage)
        if self._config.draft is not None and self._stage.is_last:
            self._draft = load_model(self._config.draft, prefix=DRAFT_PREFIX)
            if isinstance(self._draft, AutoregressiveHead):
                self._draft.share(self._model)
        lora = self._config.lora
        if lora.enable_lora:
            targets, transfers = Targets(self._model), self._device.transfers
            self._slots = AdapterSlots(
                targets,
                lora.max_loras,
                lora.max_lora_rank,
                lora_dtype(self._config),
                transfers.torch_device,
                transfers.upload,
                max_rows=lora.lora_extra_vocab_size,
                row_dtype=model_dtype(self._config),
            )
            self.adapters.use_targets(targets)

    def _row_adapters(self) -> RowAdapters | None:
        if self._slots is None:
            return None
        num_rows = self._config.scheduler.max_num_seqs
        return RowAdapters(self.adapters, self._slots, self._config.lora.max_loras, num_rows)

    def _loaded(self) -> CausalLM:
        assert self._model is not None, "load() comes first"
        return self._model

    def _models(self) -> nn.ModuleList:
        """All whose layers share the cache."""
        return nn.ModuleList([self._loaded(), *([] if self._draft is None else [self._draft])])

    def _swap_costs(self) -> SwapCosts:
        """Rates of copying and computing, roughly: a copy of a few MiB, and the step of prompts that warmed up."""
        blocks = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=self._device.transfers.torch_device)
        started = time.perf_counter()
        blocks.to("cpu", copy=True)
        return SwapCosts(_COPIED_BYTES / (time.perf_counter() - started), self._tokens_per_s)

    def _bind_cache(self, kv_config: KVCacheConfig) -> tuple[Tensor, ...]:
        """Allocate a cache, and give it to the model."""
        with _enough_memory(f"a KV cache of {kv_config.bytes / 2**20:.0f} MiB"):
            tensors = allocate_kv_cache(kv_config, self._device.transfers.torch_device)
        bind_kv_cache(self._models(), kv_config, tensors)
        return tensors

    def _warm_up(self) -> None:
        """Run the largest steps in a cache of their own, so that all that they need exists when memory is measured."""
        device, memory = self._device, self._device.memory
        least = self._least_cache()
        rehearsal = Rehearsal(
            self._config,
            memory.warm_up_tokens,
            memory.warm_up_seqs,
            least.groups,
            every_variant=device.compiles_kernels,
        )
        cache = replace(least, num_blocks=rehearsal.num_blocks)
        tensors = self._bind_cache(cache)
        if device.compiles_kernels:
            self._launch_what_no_plan_reaches(tensors)
        heads = self._draft if guesses_by_states(self._config) else None
        if self._draft is not None and heads is None:
            self._rehearse(self._draft, rehearsal, cache)
        self._tokens_per_s = self._rehearse(self._loaded(), rehearsal, cache, self._stage, heads)
        self._bind_least_cache()

    def _rehearse(
        self,
        model: CausalLM,
        rehearsal: Rehearsal,
        cache: KVCacheConfig,
        stage: Stage = ALL,
        heads: CausalLM | None = None,
    ) -> float:
        """Run its steps, and what heads make of them; returns the most tokens per second."""
        memory, best = self._device.memory, 0.0
        # A draft model may have more or fewer rows than its target.
        arch = replace(self._config.arch, vocab_size=model.config.arch.vocab_size)
        config = replace(self._config, model_arch=arch)
        with memory.rehearsal():
            runner = ModelRunner(
                model, config, cache, self._device, draft=heads, stage=stage, is_rehearsal=True
            )
        for plan in rehearsal.plans():
            started = time.perf_counter()
            with memory.rehearsal():
                runner.execute_model(plan)
            best = max(best, plan.total_num_scheduled_tokens / (time.perf_counter() - started))
        with memory.rehearsal():
            runner.prepare()
        return best

    def _launch_what_no_plan_reaches(self, cache: tuple[Tensor, ...]) -> None:
        """Copies of blocks, masks of grammars, whose vocabulary comes later, and what adapters add."""
        transfers, vocab_size = self._device.transfers, self._config.arch.vocab_size
        transfers.copy_blocks(cache, cache, [(0, 1)])
        logits = torch.zeros(1, vocab_size, device=transfers.torch_device)
        words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=transfers.torch_device)
        ops.mask_logits(logits, torch.zeros(1, dtype=torch.int64, device=transfers.torch_device), words)
        if self._slots is not None:
            self._slots.launch()

    def _bind_least_cache(self) -> None:
        """Have the model let go of its cache."""
        self._bind_cache(self._least_cache())

    def _least_cache(self) -> KVCacheConfig:
        """The null block, for groups as a rehearsal has them."""
        specs = fit_states(self.kv_cache_specs())
        return KVCacheConfig(1, rehearsed_groups(specs), specs)


@contextmanager
def _enough_memory(purpose: str) -> Iterator[None]:
    """Raises StartupError where torch finds too little memory, which is all that can fail in such a block."""
    try:
        yield
    except RuntimeError as error:
        raise StartupError(f"not enough memory for {purpose}: {error}") from error


WAKERS: dict[str, Callable[[Worker], None]] = {
    "weights": Worker._wake_weights,
    "kv_cache": Worker._wake_cache,
}
"""Tag -> how it wakes."""
