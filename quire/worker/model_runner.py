# SPDX-License-Identifier: Apache-2.0
"""Model runner: executes the scheduler's plans.

Order: update batch -> gather -> forward -> sample -> keep -> result, each a call to its owner. Request features live
in those owners and in parts from `quire.worker.feature`; device specifics live in `Device` and `Pipeline`. Nothing is
read from the device before the result is requested, except where sampling needs earlier tokens on the host.

Invariant: a failing request fails alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.config.pooling import PoolingSpec
from quire.errors import EngineError, ValidationError
from quire.kv_cache.spec import KVCacheConfig
from quire.logits_processors import make_logits_processors
from quire.models.stages import ALL, Stage
from quire.sampling_params import SamplingParams
from quire.scheduler.output import (
    STEP_PROTOCOL_VERSION,
    BranchedRow,
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
)
from quire.worker.devices import Device
from quire.worker.feature import RunnerContext, RunnerPart, WorkerFeature, worker_features
from quire.worker.graphs import most_samples
from quire.worker.input_batch import BlockTable, InputBatch
from quire.worker.inputs import StepInputs, lay_out
from quire.worker.launched_step import LaunchedStep, SampledTokens, StepMarks
from quire.worker.media_rows import MediaBatch
from quire.worker.pipeline import LanguageModel
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.sample_graphs import SampleGraphs
from quire.worker.sampler import Sampler
from quire.worker.sampler.feature import LogitsFeature
from quire.worker.sampler.logprobs import LogprobsMode
from quire.worker.sampling import RowLogits, RowSampling, SamplersByWidth, Sampling
from quire.worker.stage_pipeline import ReceivedSampling, pipeline_of
from quire.worker.transfers import Mark


def why_unusable(
    request: NewRequestData, vocab_size: int, max_model_len: int, pooling: PoolingSpec | None = None
) -> str | None:
    """Return why the request cannot get a row, or None. `pooling` is the model's.

    The front end validates requests with better messages. This check makes a bug there cost one request and never
    memory.
    """
    num_tokens = len(request.token_ids)
    if not 0 < num_tokens <= max_model_len:
        return f"the request has {num_tokens} tokens, the limit is 1 to {max_model_len}"
    if not 0 < request.num_prompt_tokens <= num_tokens:
        return f"the request has {request.num_prompt_tokens} prompt tokens of {num_tokens} tokens"
    refusal = _why_not_pooled(request, pooling)
    if refusal is not None:
        return refusal
    params = request.sampling_params
    if params.thinking_token_budget is not None and params.thinking_markers is None:
        return "thinking_token_budget needs thinking_markers"
    indexed: dict[str, Iterable[int]] = {
        "token id": request.token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "bad_words_token_ids": [token_id for word in params.bad_words_token_ids for token_id in word],
        "thinking_markers": _markers(params),
    }
    return next((bad for name, ids in indexed.items() if (bad := _out_of_range(name, ids, vocab_size))), None)


def _why_not_pooled(request: NewRequestData, pooling: PoolingSpec | None) -> str | None:
    params = request.pooling_params
    if pooling is None or params is None:
        generates, pools = params is None, pooling is not None
        if generates != pools:
            return None
        return "the model pools prompts and generates nothing" if pools else "the model has no pooler"
    try:
        pooling.check(params)
    except ValidationError as error:
        return str(error)
    return None


def _markers(params: SamplingParams) -> tuple[int, ...]:
    markers = params.thinking_markers
    return () if markers is None else (*markers.start_ids, *markers.end_ids)


def _out_of_range(name: str, token_ids: Iterable[int], vocab_size: int) -> str | None:
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low >= 0 and high < vocab_size:
        return None
    return f"{name} {low if low < 0 else high} is not in the vocabulary of {vocab_size} tokens"


_TOKENS_PER_READ_ROW = 4
"""Tokens per sample from which computing the last layer for sampled rows only pays for the gather."""


class KeepsRows(Protocol):
    """Owner of per-row state."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the state of a request that was given a row."""

    def remove_request(self, row: int) -> None:
        """Drop the state of a row."""


class ModelRunner:
    """Owner of the batch and of all per-row state.

    Args:
        model: loaded, its KV cache bound.
        config: prepared.
        kv_config: the cache that was allocated.
        device: where the model and its cache are.
        features: features of the worker; None: those that the config needs.
        media: media of the rows, if the model takes some.
        stage: pipeline stage of the model; the last one samples and sends the tokens to the others.
        is_rehearsal: the steps are run to measure memory.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        kv_config: KVCacheConfig,
        device: Device,
        *,
        features: Iterable[WorkerFeature] | None = None,
        media: MediaBatch | None = None,
        stage: Stage = ALL,
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
            max_num_seqs, max_model_len, tables, rolls_back=kv_config.rolls_back, media=media
        )
        if features is None:
            features = worker_features(config, device, stage=stage).values()
        features = tuple(features)
        if not is_rehearsal:
            for feature in features:
                feature.attach(self.batch)
        self._pipeline = pipeline_of(stage, model, self.batch, config, device, is_rehearsal=is_rehearsal)
        mode = LogprobsMode(config.model.logprobs_mode)
        self._logits = RowLogits(
            model, self.batch, self._vocab_size, config.max_added_tokens, device.transfers
        )
        batch = self.batch  # not `self`: a runner must not be part of a cycle (see `Worker.commit_weights`)
        self._samplers = SamplersByWidth(
            lambda width: Sampler(
                batch,
                width,
                device.transfers,
                logprobs_mode=mode,
                processors=() if is_rehearsal else make_logits_processors(config),
                features=_logits_features(features, batch, width),
            ),
            self._logits,
            self._vocab_size,
        )
        self._sampling: Sampling = RowSampling(
            self._logits, self._samplers, self._slice_size, device.transfers, self._sample_graphs(config)
        )
        if not stage.is_last:
            self._sampling = ReceivedSampling(stage)
        context = RunnerContext(
            model, config, kv_config, self.batch, device, self._samplers.plain, self._slice_size, is_rehearsal
        )
        self.parts: tuple[RunnerPart, ...] = _parts(features, context) if stage.is_last else ()
        """Parts of features; stages before the last neither sample nor pool."""
        self._prompt_logprobs = PromptLogprobs(
            self.batch, self._logits, self._slice_size, device.transfers, mode
        )
        self._pooling = config.pooling
        self._row_users: tuple[KeepsRows, ...] = self.parts
        """Owners of per-row state; a pooling model and stages before the last do not sample."""
        if config.pooling is None and stage.is_last:
            self._row_users = (self._sampling, self._prompt_logprobs, *self.parts)
        self._rounds = self._pipeline.rounds
        if self._rounds is not None:
            self._row_users = (*self._row_users, self._rounds)
        # A rehearsal measures full steps, and an asynchronous device has compiled its kernels for full steps.
        self._reads_samples_only = (
            stage.is_last
            and config.pooling is None
            and not any(part.reads_all_tokens for part in self.parts)
            and not device.is_asynchronous
            and not is_rehearsal
        )
        self._unusable: dict[str, str] = {}
        self._most_ahead = max(config.scheduler.max_steps_in_flight - 1, 0)
        self._unread: list[LaunchedStep] = []

    def _sample_graphs(self, config: EngineConfig) -> SampleGraphs | None:
        """Return the sampling graphs if the pipeline captures graphs and the model samples."""
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
            adapts=config.serves_adapters,
        )

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Launch one step and wait for its result."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Launch a step on the device.

        Raises:
            EngineError: the plan contradicts itself or the batch, or has another version; this is an internal bug.
        """
        if plan.version != STEP_PROTOCOL_VERSION:
            raise EngineError(
                f"step {plan.step_id} has plan version {plan.version}; this worker expects {STEP_PROTOCOL_VERSION}"
            )
        if self._pipeline.reads_host_tokens:
            self._read_results({request.request_id for request in plan.scheduled})
        unusable = self._update_batch(plan)
        scheduled = [request for request in plan.scheduled if request.request_id not in unusable]
        ids = [request.request_id for request in scheduled]
        started = self._transfers.mark()
        if not ids:
            return LaunchedStep(plan.step_id, ids, unusable, StepMarks(started, started, started), self.batch)
        inputs = self._restrict_rows(self._pipeline.gather(lay_out(self.batch, scheduled)))
        hidden = self._pipeline.forward(inputs)
        for part in self.parts:
            part.follow(inputs, hidden)
        forwarded = self._transfers.mark()
        prompts = self._prompt_logprobs.compute(inputs.layout, hidden, inputs.step.adapter_rows)
        parts = [made for part in self.parts if (made := part.compute(inputs, hidden)) is not None]
        if self._sampling.reads_tokens(inputs):
            self._read_results(set(ids))
        sampled = self._sample(inputs, hidden, scheduled)
        if plan.max_decode_steps > 1 and sampled is not None:
            sampled = self._decode_further(inputs, sampled, plan.max_decode_steps - 1, started)
        marks = StepMarks(started, forwarded, self._transfers.mark())
        step = LaunchedStep(
            plan.step_id,
            ids,
            unusable,
            marks,
            self.batch,
            sampled,
            prompts,
            parts,
            inputs.layout.num_tokens if inputs.layout.only_generates else 0,
        )
        self._unread = [*(earlier for earlier in self._unread if not earlier.is_read), step]
        return step

    def _restrict_rows(self, inputs: StepInputs) -> StepInputs:
        """Restrict the last layer to the sampled rows, if they are few and nothing else reads the others."""
        layout, step = inputs.layout, inputs.step
        are_few = layout.num_tokens >= _TOKENS_PER_READ_ROW * len(layout.logits_indices)
        if not are_few or not self._reads_samples_only:
            return inputs
        if self._prompt_logprobs.are_wanted or self._sampling.replays:
            return inputs
        if step.adapter_rows is not None:  # the MLP reads one adapter row per token
            return inputs
        return replace(inputs, step=replace(step, wanted=inputs.logits_indices))

    @torch.inference_mode()
    def prepare(self) -> None:
        """Do one-time work (graph capture, recording) before the first step."""
        self._pipeline.prepare()

    def calibrate(self) -> None:
        """Let features run steps before the first request."""
        for part in self.parts:
            part.calibrate(self.launch)

    def read_all(self) -> None:
        """Read the results of all launched steps."""
        self._read(len(self._unread))

    def _read_results(self, request_ids: Set[str]) -> None:
        """Wait until the host's rows have all tokens sampled so far for some requests.

        Steps older than the in-flight limit are read too, so that they are freed.
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
        """Branch, remove, add and extend rows as planned; return unusable requests with their reasons.

        They are remembered, because plans made before the scheduler receives the failure still name them.
        """
        if plan.branches:
            self._branch(plan.branches)
        for request_id in plan.removed_request_ids:
            self._remove(request_id)
        for request in plan.new_requests:
            reason = why_unusable(request, self._num_tokens(request), self._max_model_len, self._pooling)
            reason = reason or self._why_media(request)
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

    def _branch(self, branches: Sequence[BranchedRow]) -> None:
        for row, one in zip(self.batch.branch(branches).tolist(), branches, strict=True):
            self._sampling.set_num_logprobs(row, one.num_logprobs)

    def _why_media(self, request: NewRequestData) -> str | None:
        """Return why the request's media are unusable, or None."""
        if not request.media:
            return None
        media = self.batch.media
        return "the model takes no media" if media is None else media.why_unusable(request)

    def _add(self, request: NewRequestData) -> None:
        row = self.batch.add(request)
        for part in self._row_users:
            part.add_request(row, request)

    def _grow(self, scheduled: ScheduledRequest) -> None:
        if scheduled.draft_token_ids:
            num_tokens = self._logits.num_tokens(self.batch.row(scheduled.request_id))
            if not all(0 <= token_id < num_tokens for token_id in scheduled.draft_token_ids):
                raise EngineError(f"the plan has {scheduled}, but the vocabulary has {num_tokens} tokens")
        self.batch.grow(scheduled)

    def _remove(self, request_id: str) -> None:
        if self._unusable.pop(request_id, None) is None:
            row = self.batch.remove(request_id)
            for part in self._row_users:
                part.remove_request(row)

    def _sample(
        self, inputs: StepInputs, hidden: Tensor, scheduled: list[ScheduledRequest]
    ) -> SampledTokens | None:
        """Sample as planned and advance the rows; the number of accepted drafts follows with the result."""
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

    def _decode_further(
        self, inputs: StepInputs, sampled: SampledTokens, num_rounds: int, started: Mark
    ) -> SampledTokens:
        """Decode further tokens by multi-step decode, if the pipeline supports it.

        Raises:
            EngineError: a request has too few blocks.
        """
        layout, began = inputs.layout, self._transfers.mark()
        for table in self.batch.block_tables:
            if (layout.ends + num_rounds > table.capacity(layout.rows)).any():
                raise EngineError(
                    f"the plan has {num_rounds} further decode rounds but no KV cache blocks for them"
                )
        if self._rounds is None or len(sampled.parts) > 1 or not self._logits.are_of_model(layout.rows):
            return sampled
        token_ids = sampled.parts[0].codes.numpy()
        took_s = began.seconds_since(started)
        further = self._rounds.more(inputs, token_ids, self._samplers.plain, num_rounds, took_s)
        self.batch.advance(layout.rows, layout.ends + len(further), np.full(len(layout.rows), len(further)))
        return sampled._replace(further=further, further_s=self._transfers.mark().seconds_since(began))

    def _num_tokens(self, request: NewRequestData) -> int:
        adapters = self.batch.adapters
        return self._vocab_size + (0 if adapters is None else adapters.num_added_of(request))


def _logits_features(
    features: Iterable[WorkerFeature], batch: InputBatch, width: int
) -> list[LogitsFeature[Any]]:
    """Return the sampling features of worker features, for a sampler of so many logits."""
    made = (feature.make_logits_feature(batch, width) for feature in features)
    return [one for one in made if one is not None]


def _parts(features: Iterable[WorkerFeature], context: RunnerContext) -> tuple[RunnerPart, ...]:
    made = (feature.make_part(context) for feature in features)
    return tuple(part for part in made if part is not None)
