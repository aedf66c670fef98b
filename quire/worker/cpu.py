# SPDX-License-Identifier: Apache-2.0
"""Host processor as the worker's device.

Invariant: every operation is done when its call returns, so nothing is ever copied or waited for.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import CDLL, c_int64
from typing import cast

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.cpu import library
from quire.kernels.cpu.arena import Arena, discard_pages, huge_page_blocks
from quire.kernels.cpu.calls import lending
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.cpu.sized_graph import UnrecordedOps
from quire.layers.kv_cache import why_not_captured
from quire.platforms import Host
from quire.worker.block_copies import Moves, copy_on_host
from quire.worker.feature import step_bytes
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs
from quire.worker.multi_step_decode import RecordedMultiStepDecode
from quire.worker.pipeline import Forward, HostPipeline, LanguageModel, Pipeline, PipelineModel, eager_forward
from quire.worker.recorded_forward import RecordedForward
from quire.worker.stage_sizes import FLOAT_BYTES, GAPS, ForwardPeak
from quire.worker.transfers import Mark

logger = logging.getLogger(__name__)

MIB = 2**20
UNASKED_SHARE = 0.5
"""Default share of the memory that is free after loading; other programs get the rest."""
LOGITS_ELEMENTS = 1 << 23
"""Most elements of logits at once: 32 MiB of float32."""
SMALL_STEP = 128
"""Tokens; in larger steps, Python between the kernels takes a small part of the time."""


def recorded_tokens(config: EngineConfig) -> int:
    """Return the tokens of the largest recorded step: one of every request, or a few requests' drafts and prompts."""
    limits = config.scheduler
    return max(limits.max_num_seqs, min(SMALL_STEP, limits.max_num_batched_tokens))


class HostMark:
    """Point in time."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Return at once: the time has passed."""

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark), "marks of one device"
        return self._time - earlier._time


class CpuTransfers:
    """Transfers on the host, which holds all tensors and completes each call at once."""

    torch_device = torch.device("cpu")

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def download(self, tensor: Tensor) -> Tensor:
        return tensor

    def mark(self) -> Mark:
        return HostMark()

    def host_memory(self, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialized memory; untouched pages cost none."""
        return huge_page_blocks(*shape)

    def copy_blocks(self, sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Moves) -> None:
        copy_on_host(sources, targets, moves)


class CpuMemory:
    """Memory that all programs of the machine share.

    Attributes:
        forward_peak: memory that forward passes take; the pipeline of a rehearsal measures it.
        outputs: arena for the large outputs of a step, reused by the next one; None: they are allocated anywhere.
    """

    warm_up_tokens = 32
    warm_up_seqs = 1  # shows whether decode steps can be recorded; the first one needed is

    def __init__(self, host: Host) -> None:
        self._host = host
        self.forward_peak = ForwardPeak()
        self.outputs: Arena | None = None

    def rehearsal(self) -> AbstractContextManager[None]:
        """Return an empty context: the pipeline of a rehearsal measures its forward passes itself."""
        return nullcontext()

    def usable_bytes(self, config: EngineConfig) -> tuple[int, str]:
        """Return the usable bytes, and the reason; the swap space, in the same memory, is excluded."""
        share, limits = config.cache.memory_share, config.scheduler
        free, (step, graphs) = self._free_bytes(config), self._working_bytes(config)
        reason = (
            f"{share:.0%} of the {free / MIB:.0f} MiB that are free after loading, less "
            f"{step / MIB:.0f} MiB for a step of {limits.max_num_batched_tokens} tokens and "
            f"{graphs / MIB:.0f} MiB for recorded steps of {recorded_tokens(config)} tokens"
        )
        return max(0, int(share * free) - step - graphs), reason

    def unasked_bytes(self, config: EngineConfig) -> int | None:
        """Return half of the free bytes, less those of steps; None if a share is given."""
        if config.cache.gpu_memory_utilization is not None:
            return None
        return max(0, int(UNASKED_SHARE * self._free_bytes(config)) - sum(self._working_bytes(config)))

    def _free_bytes(self, config: EngineConfig) -> int:
        """Return the free bytes; for a replica those of its own share, whatever the others have taken of theirs."""
        free = self._host.available_bytes()
        if config.share is not None:
            taken = self._host.own_bytes(config.share.num_replicas) * config.parallel.num_ranks
            free = min(free, config.share.memory_bytes - taken)
        return max(0, free - config.cache.swap_space_bytes)

    def _working_bytes(self, config: EngineConfig) -> tuple[int, int]:
        """Return the bytes of the largest step, with what features take in it, and those of recorded steps."""
        step = self._output_bytes(config) + step_bytes(config) + self.size_of_rounds(config)[1]
        num_models = 1 if config.draft is None else 2
        graphs = num_models * self.forward_peak.graph_bytes(recorded_tokens(config))
        return step, 0 if config.device.enforce_eager else graphs

    def size_of_rounds(self, config: EngineConfig) -> tuple[int, int]:
        """Return the most requests of a multi-step decode, and bytes for the tensors of a round, logits among them."""
        if config.scheduler.num_scheduler_steps <= 1:
            return 0, 0
        num_rows = max(1, min(recorded_tokens(config), LOGITS_ELEMENTS // config.arch.vocab_size))
        logits_bytes = int(GAPS * num_rows * config.arch.vocab_size * FLOAT_BYTES)
        return num_rows, self.forward_peak.graph_bytes(num_rows) + logits_bytes

    def _output_bytes(self, config: EngineConfig) -> int:
        limits = config.scheduler
        num_logits = min(limits.max_num_seqs * config.arch.vocab_size, LOGITS_ELEMENTS)
        return int(GAPS * self.forward_peak.bytes_of_step(limits.max_num_batched_tokens, num_logits))

    def place_outputs(self, config: EngineConfig) -> None:
        """Place outputs in an arena until `give_back`; pages that no step reaches cost no memory."""
        if self.outputs is None:
            self.outputs = Arena(self._output_bytes(config))

    def give_back(self) -> None:
        """Free the outputs and what the C library keeps for later, if it has `malloc_trim` (glibc)."""
        self.outputs = None
        self._trim()

    def discard(self, tensors: Sequence[Tensor]) -> bool:
        """Discard the pages of tensors and of the outputs; see `DeviceMemory`."""
        if not all(map(discard_pages, tensors)):
            return False
        if self.outputs is not None:
            self.outputs.discard()
        self._trim()
        return True

    def _trim(self) -> None:
        trim = getattr(CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class CpuDevice:
    """CPU with one team of threads."""

    is_asynchronous = False
    parks_weights = False  # the host holds them already
    compiles_kernels = False
    logits_elements = LOGITS_ELEMENTS

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or Host()
        self._unrecorded: str | None = None
        self.memory = CpuMemory(self._host)
        self.transfers = CpuTransfers()

    def start(self, config: EngineConfig) -> None:
        """Set the number of compute threads of this process."""
        asked = config.device.cpu_threads
        threads, reason = (asked, "as --cpu-threads says") if asked else self._default_threads()
        set_num_threads(threads)
        logger.info("cpu_threads = %d: %s", threads, reason)
        if config.device.cpu_pin_threads:
            self._pin(threads)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step, in which torch's operations between the kernels handle floats as the kernels do."""
        with library.as_in_kernels(), lending.of(self.memory.outputs):
            yield

    def pipeline(
        self,
        model: PipelineModel,
        batch: InputBatch,
        config: EngineConfig,
        *,
        is_rehearsal: bool = False,
        samples_here: bool = True,
    ) -> Pipeline:
        """Return the pipeline, which replays decode steps and an encoder's small ones, unless --enforce-eager."""
        peak = self.memory.forward_peak
        if is_rehearsal:
            return HostPipeline(batch, self._rehearsed(eager_forward(model)))
        self.memory.place_outputs(config)
        if config.device.enforce_eager:
            return HostPipeline(batch, eager_forward(model))
        reason = why_not_captured(model) or self._unrecorded
        if reason is not None:
            logger.warning("small steps are not recorded, so each takes Python's time as well: %s", reason)
            return HostPipeline(batch, eager_forward(model))
        widths = tuple(table.block_ids.shape[1] for table in batch.block_tables)
        num_tokens = recorded_tokens(config)
        arena_bytes = peak.graph_bytes(num_tokens)
        forward = RecordedForward(model, num_tokens, widths, arena_bytes)
        rounds = self._rounds(model, batch, config)
        if rounds is None:
            return HostPipeline(batch, forward, forward.record)

        def record(inputs: StepInputs) -> None:
            forward.record(inputs)
            rounds.record(inputs)

        return HostPipeline(batch, forward, record, rounds)

    def _rounds(
        self, model: PipelineModel, batch: InputBatch, config: EngineConfig
    ) -> RecordedMultiStepDecode | None:
        """Return the recorded rounds; None if a plan has only one."""
        if config.scheduler.num_scheduler_steps <= 1:
            return None
        num_rows, num_bytes = self.memory.size_of_rounds(config)
        generates = cast(LanguageModel, model)  # plans of other models have one round
        return RecordedMultiStepDecode(
            generates, batch, num_rows, num_bytes, config.scheduler.max_multi_step_s
        )

    def _rehearsed(self, forward: Forward) -> Forward:
        """Return the forward pass; it measures prompts, and for one token notes an unrecordable operation."""
        peak = self.memory.forward_peak
        measured = peak.measured(forward)

        def run(inputs: StepInputs) -> Tensor:
            if len(inputs.input_ids) > 1 or not peak.is_measured:
                return measured(inputs)
            with UnrecordedOps() as seen:
                hidden = forward(inputs)
            self._unrecorded = seen.first and f"{seen.first} runs between the kernels"
            return hidden

        return run

    def _default_threads(self) -> tuple[int, str]:
        if os.environ.get("OMP_NUM_THREADS"):
            return torch.get_num_threads(), "as OMP_NUM_THREADS says"
        return self._host.num_threads()

    def _pin(self, num_threads: int) -> None:
        """Pin each thread of the team to its own core.

        Raises:
            ConfigError: there are too few cores, no C++ kernels, or the system refuses.
        """
        cpus, loaded = self._host.processors(), library.loaded()
        if loaded is None or num_threads > len(cpus):
            have = f"there are {len(cpus)}" if loaded is not None else library.status()
            raise ConfigError(f"--cpu-pin-threads needs a core for each of {num_threads} threads; {have}")
        own = cpus[:num_threads]
        if loaded.pin_threads((c_int64 * num_threads)(*own), num_threads):
            raise ConfigError(
                f"--cpu-pin-threads: the system refuses to keep threads on processors {own[1:]}"
            )
        logger.info("compute threads other than the first are pinned to processors %s", own[1:])
