"""The model runner: carries out plans.

Invariant: plan -> batch -> gather -> forward -> sample -> keep -> result, each a call to the part that owns it; what a
request may ask for lives in those parts, and what kind of device it is in `Device` and `Pipeline`, and neither as a
branch here. Nothing is read from the device before the result is asked for, but for what needs sampled tokens on the
host. A request that fails costs itself alone.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import EngineError
from quire.kv_cache.spec import KVCacheConfig
from quire.logits_processors import make_logits_processors
from quire.models.stages import ALL, Stage
from quire.scheduler.output import (
    WAIST_VERSION,
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
)
from quire.spec_decode.clocks import Clocks
from quire.spec_decode.speculation import Speculation
from quire.structured_output.store import GrammarStore
from quire.worker.block_table import BlockTable
from quire.worker.calibration import Calibration
from quire.worker.devices import Device, Mark
from quire.worker.drafts import GUESSING_MODELS, make_speculation
from quire.worker.graph_shapes import most_samples
from quire.worker.guessing_model import GuessingModel
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs, lay_out
from quire.worker.launched_step import LaunchedStep, Marks, SampledTokens
from quire.worker.pipeline import LanguageModel
from quire.worker.pooling import Pooler
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.row_adapters import RowAdapters
from quire.worker.row_logits import RowLogits
from quire.worker.sample_graphs import SampleGraphs
from quire.worker.sampler import Sampler
from quire.worker.sampler.logprobs import LogprobsMode
from quire.worker.samplers import Samplers
from quire.worker.sampling import RowSampling, Sampling
from quire.worker.stage_pipeline import SampledElsewhere, pipeline_of
from quire.worker.validation import why_unusable

_TOKENS_PER_READ_ROW = 4
"""From so many on, picking the rows that are read costs less than what is left out of the others."""


class KeepsRows(Protocol):
    """Keeps something of the requests that have a row."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """A request was given a row."""

    def remove_request(self, row: int) -> None:
        """It has lost it."""


class ModelRunner:
    """Owns the batch and everything kept per row.

    Args:
        model: loaded, its KV cache bound.
        config: prepared.
        kv_config: the cache that was allocated.
        device: where the model and its cache are.
        grammars: where constraints are compiled; its own, if nobody prepares any.
        adapters: those of the rows, where adapters are served.
        draft: a model that guesses what this one says, or heads that do, its KV cache bound.
        stage: that the model is; what the last one samples is told to the others, and is the result of the last alone.
        speculation: guesses tokens for later plans to verify; by default as the configuration says.
        clocks: that decide how much is guessed; None: this process's.
        is_rehearsal: its steps are run to see what memory steps take.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        kv_config: KVCacheConfig,
        device: Device,
        *,
        grammars: GrammarStore | None = None,
        adapters: RowAdapters | None = None,
        draft: LanguageModel | None = None,
        stage: Stage = ALL,
        speculation: Speculation | None = None,
        clocks: Clocks | None = None,
        is_rehearsal: bool = False,
    ) -> None:
        max_num_seqs, max_model_len = config.scheduler.max_num_seqs, config.model.max_model_len
        tables = tuple(
            BlockTable(
                max_num_seqs,
                max_model_len,
                group.spec,
                kv_config.num_blocks,
                kv_config.parts_per_block(group),
            )
            for group in kv_config.groups
        )
        self._model = model
        self._transfers = device.transfers
        self._max_model_len = max_model_len
        self._vocab_size = config.arch.vocab_size
        self._slice_size = max(1, device.logits_elements // (self._vocab_size + config.max_added_tokens))
        self.batch = InputBatch(
            max_num_seqs, max_model_len, tables, rolls_back=kv_config.rolls_back, adapters=adapters
        )
        self._pipeline = pipeline_of(stage, model, self.batch, config, device, is_rehearsal=is_rehearsal)
        mode = LogprobsMode(config.model.logprobs_mode)
        self._logits = RowLogits(
            model, self.batch, self._vocab_size, config.max_added_tokens, device.transfers
        )
        grammars = grammars or GrammarStore(config.structured_outputs.settings)
        self._samplers = Samplers(
            lambda width: Sampler(
                self.batch,
                width,
                device.transfers,
                logprobs_mode=mode,
                processors=() if is_rehearsal else make_logits_processors(config),
                grammars=grammars,
            ),
            self._logits,
            self._vocab_size,
        )
        self._sampling: Sampling = RowSampling(
            self._logits, self._samplers, self._slice_size, device.transfers, self._sample_graphs(config)
        )
        if not stage.is_last:
            self._sampling = SampledElsewhere(stage)
        self._guessing = None
        if draft is not None:
            self._guessing = self._guessing_model(draft, config, device, is_rehearsal=is_rehearsal)
        if speculation is None and stage.is_last and not is_rehearsal:
            grammars_read = self._samplers.plain.grammar_mask
            speculation = make_speculation(
                config, kv_config, self.batch, grammars_read, self._guessing, clocks
            )
        self._speculation = speculation
        self._prompt_logprobs = PromptLogprobs(
            self.batch, self._logits, self._slice_size, device.transfers, mode
        )
        self._pooling = config.pooling
        self._pooler = Pooler(self.batch, model, config.pooling, device.transfers)
        self._rows_of: tuple[KeepsRows, ...] = (self._pooler,)
        """What keeps something of each request: pooled models sample nothing, nor do stages before the last."""
        if config.pooling is None:
            guessing = () if self._guessing is None else (self._guessing,)
            self._rows_of = (self._sampling, self._prompt_logprobs, *guessing)
        if not stage.is_last:
            self._rows_of = ()
        self._rounds = self._pipeline.rounds
        if self._rounds is not None:
            self._rows_of = (*self._rows_of, self._rounds)
        # A rehearsal is of steps that leave out nothing; a device has compiled its kernels for such.
        self._reads_samples_only = (
            stage.is_last
            and config.pooling is None
            and self._guessing is None
            and not device.is_asynchronous
            and not is_rehearsal
        )
        self._unusable: dict[str, str] = {}
        self._most_ahead = max(config.scheduler.max_steps_in_flight - 1, 0)
        self._unread: list[LaunchedStep] = []

    def _sample_graphs(self, config: EngineConfig) -> SampleGraphs | None:
        """Where the pipeline has graphs, and something is sampled behind them."""
        room = self._pipeline.room
        if room is None or config.pooling is not None:
            return None
        return SampleGraphs(
            room,
            self._logits,
            self._samplers.plain,
            self._transfers,
            most=min(self._slice_size, most_samples(config)),
            vocab_size=self._vocab_size,
            longest=self._max_model_len,
            adapts=config.lora.enable_lora,
        )

    def _guessing_model(
        self, model: LanguageModel, config: EngineConfig, device: Device, *, is_rehearsal: bool
    ) -> GuessingModel:
        """On a device its passes are launched kernel by kernel: what they read has no lasting place."""
        method, launched = config.speculative.settings.method, config
        assert method is not None, "whoever has a model for guesses says how it guesses"
        if device.is_asynchronous:
            launched = replace(config, device=replace(config.device, enforce_eager=True))
        return GUESSING_MODELS[method](
            model,
            self.batch,
            device.pipeline(model, self.batch, launched, is_rehearsal=is_rehearsal),
            self._samplers.plain,
            device.transfers,
            config=config,
            slice_size=self._slice_size,
        )

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step from beginning to end."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Hand a step over to the device.

        Raises:
            EngineError: the plan contradicts itself or the batch, or is of another version, which is a bug of ours.
        """
        if plan.version != WAIST_VERSION:
            raise EngineError(
                f"step {plan.step_id} is planned in version {plan.version}, not {WAIST_VERSION}"
            )
        if self._pipeline.reads_host_tokens:
            self._read_results({request.request_id for request in plan.scheduled})
        unusable = self._update_batch(plan)
        scheduled = [request for request in plan.scheduled if request.request_id not in unusable]
        ids = [request.request_id for request in scheduled]
        started = self._transfers.mark()
        if not ids:
            return LaunchedStep(plan.step_id, ids, unusable, Marks(started, started, started), self.batch)
        inputs = self._of_wanted(self._pipeline.gather(lay_out(self.batch, scheduled)))
        hidden = self._pipeline.forward(inputs)
        if self._guessing is not None:
            self._guessing.follow(inputs, hidden)
        forwarded = self._transfers.mark()
        prompts = self._prompt_logprobs.compute(inputs.layout, hidden, inputs.step.adapter_rows)
        pooled = self._pooler.compute(inputs.layout, hidden, inputs.step.adapter_rows)
        if self._sampling.reads_tokens(inputs):
            self._read_results(set(ids))
        sampled = self._sample(inputs, hidden, scheduled)
        if plan.max_rounds > 1 and sampled is not None:
            sampled = self._go_on(inputs, sampled, plan.max_rounds - 1, started)
        marks = Marks(started, forwarded, self._transfers.mark())
        step = LaunchedStep(
            plan.step_id,
            ids,
            unusable,
            marks,
            self.batch,
            sampled,
            prompts,
            pooled,
            self._speculation,
            inputs.layout.num_tokens if inputs.layout.only_generates else 0,
        )
        self._unread = [*(earlier for earlier in self._unread if not earlier.is_read), step]
        return step

    def _of_wanted(self, inputs: StepInputs) -> StepInputs:
        """With the rows that are read, where they are few and samples are all that is made of them."""
        layout, step = inputs.layout, inputs.step
        are_few = layout.num_tokens >= _TOKENS_PER_READ_ROW * len(layout.logits_indices)
        if not are_few or not self._reads_samples_only:
            return inputs
        if self._prompt_logprobs.are_wanted or self._sampling.replays:
            return inputs
        if step.adapter_rows is not None:  # of which the MLP has one for each row
            return inputs
        return replace(inputs, step=replace(step, wanted=inputs.logits_indices))

    @torch.inference_mode()
    def prepare(self) -> None:
        """Do before the first step what should not hold one up; of a rehearsal, to see what it takes."""
        self._pipeline.prepare()

    def calibrate(self, calibration: Calibration, clocks: Clocks) -> None:
        """Time some steps if anybody decides by what they take; who guesses sees none of it. There are no requests yet.

        `clocks` say how long steps took, for all ranks that run them.
        """

        def timed(plan: SchedulerOutput) -> float:
            step = self.launch(plan)
            step.result()
            (seconds,) = clocks.agreed([step.marks.done.seconds_since(step.marks.started)])
            return seconds

        speculation = self._speculation
        if speculation is None or speculation.costs is None:
            return
        self._speculation = None
        try:
            calibration.run(timed, speculation.costs)
        finally:
            self._speculation = speculation

    def read_all(self) -> None:
        """Take in what steps that have run still have to say."""
        self._read(len(self._unread))

    def _read_results(self, request_ids: Set[str]) -> None:
        """Wait until the host's rows have all that was sampled so far for some requests.

        What is further back than steps can be in flight is there already, and is not left lying.
        """
        behind = [
            number
            for number, step in enumerate(self._unread, 1)
            if step.sampled is not None and not request_ids.isdisjoint(step.request_ids)
        ]
        self._read(max(len(self._unread) - self._most_ahead, *behind, 0))

    def _read(self, num_steps: int) -> None:
        for step in self._unread[:num_steps]:
            step.result()
        self._unread = self._unread[num_steps:]

    def _update_batch(self, plan: SchedulerOutput) -> dict[str, str]:
        """Bring the rows in line with the plan; returns requests that cannot have one, with the reason.

        These are remembered, because plans made before the scheduler hears of it still name them.
        """
        for request_id in plan.removed_request_ids:
            self._remove(request_id)
        for request in plan.new_requests:
            reason = why_unusable(request, self._num_tokens(request), self._max_model_len, self._pooling)
            if reason is None:
                self._add(request)
            else:
                self._unusable[request.request_id] = reason
        unusable: dict[str, str] = {}
        for scheduled in plan.scheduled:
            if scheduled.request_id in self._unusable:
                unusable[scheduled.request_id] = self._unusable[scheduled.request_id]
            elif scheduled.num_samples > 1 or scheduled.draft_token_ids or any(scheduled.new_block_ids):
                self._grow(scheduled)
        return unusable

    def _add(self, request: NewRequestData) -> None:
        row = self.batch.add(request)
        for part in self._rows_of:
            part.add_request(row, request)
        if self._speculation is not None:
            self._speculation.add_request(request.request_id, request.num_prompt_tokens, request.owner)

    def _grow(self, scheduled: ScheduledRequest) -> None:
        if scheduled.draft_token_ids:
            num_tokens = self._logits.num_tokens(self.batch.row(scheduled.request_id))
            if not all(0 <= token_id < num_tokens for token_id in scheduled.draft_token_ids):
                raise EngineError(f"the plan has {scheduled}, and the request's model {num_tokens} tokens")
        self.batch.grow(scheduled)

    def _remove(self, request_id: str) -> None:
        if self._unusable.pop(request_id, None) is None:
            row = self.batch.remove(request_id)
            for part in self._rows_of:
                part.remove_request(row)
            if self._speculation is not None:
                self._speculation.remove_request(request_id)

    def _sample(
        self, inputs: StepInputs, hidden: Tensor, scheduled: list[ScheduledRequest]
    ) -> SampledTokens | None:
        """Sample what is planned, and make room in the rows for it; how far drafts lead is known with the result."""
        layout = inputs.layout
        parts = self._sampling.sample(inputs, hidden)
        drafts: dict[int, list[int]] = {}
        if layout.num_drafts is None:
            self.batch.advance(layout.rows, layout.ends, layout.num_samples)
        else:
            self.batch.advance(layout.rows, layout.ends - layout.num_drafts, layout.num_samples == 1)
            drafts = {i: one.draft_token_ids for i, one in enumerate(scheduled) if one.draft_token_ids}
        if not parts:
            return None
        self._pipeline.keep([part.codes for part in parts])
        downloaded = [part.moved(self._transfers.download) for part in parts]
        return SampledTokens(layout.sampling, downloaded, self.batch.places(layout.samples), drafts)

    def _go_on(
        self, inputs: StepInputs, sampled: SampledTokens, num_rounds: int, started: Mark
    ) -> SampledTokens:
        """With what further rounds generate, if there are any.

        Raises:
            EngineError: requests have no blocks for so many.
        """
        layout, began = inputs.layout, self._transfers.mark()
        for table in self.batch.block_tables:
            if (layout.ends + num_rounds > table.capacity(layout.rows)).any():
                raise EngineError(f"the plan has {num_rounds} further rounds and no cache blocks for them")
        if self._rounds is None or len(sampled.parts) > 1 or not self._logits.are_of_model(layout.rows):
            return sampled
        token_ids = sampled.parts[0].codes.numpy()
        took_s = began.seconds_since(started)
        further = self._rounds.more(inputs, token_ids, self._samplers.plain, num_rounds, took_s)
        self.batch.advance(layout.rows, layout.ends + len(further), np.full(len(layout.rows), len(further)))
        return sampled._replace(further=further, further_s=self._transfers.mark().seconds_since(began))

    def _num_tokens(self, request: NewRequestData) -> int:
        adapters = self.batch.adapters
        return self._vocab_size + (0 if adapters is None else adapters.num_added_of(request.lora_request))
