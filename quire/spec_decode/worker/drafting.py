# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on one worker: the draft model or draft heads, and the runner part that proposes drafts.

Invariant: a request's output is the same as without drafts. After each draft token a step samples what it would sample
if all tokens before were the request's, and that counts only where they are. So verification is a comparison, whatever
shapes sampling (after Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, with the
sampled token itself in place of a test that only preserves its distribution).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.config.speculative import DRAFT_MODEL, EAGLE, EAGLE3, MEDUSA, MTP
from quire.errors import StartupError
from quire.kv_cache.spec import KVCacheConfig
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.scheduler.output import NewRequestData, SchedulerOutput
from quire.spec_decode.drafter import Drafter, make_drafters
from quire.spec_decode.models.eagle import AutoregressiveHead
from quire.spec_decode.speculation import Speculation, Verified
from quire.spec_decode.step_costs import StepClocks
from quire.spec_decode.worker.calibration import (
    Calibration,
    group_clocks,
    is_calibrated,
    make_clocks,
    shapes_of,
)
from quire.spec_decode.worker.draft_model import make_draft_model
from quire.spec_decode.worker.head_chain import HeadChain, Medusa
from quire.spec_decode.worker.jump_ahead import jump_ahead
from quire.spec_decode.worker.proposer import ModelProposer, kept_bytes, passing_bytes, uses_draft_heads
from quire.worker.feature import RunnerContext, RunnerPart, WorkerFeature
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs
from quire.worker.launched_step import LaunchedStep, StepOutcome, StepPart
from quire.worker.sampler import Sampler
from quire.worker.verification import known_tokens


class WorkerDrafting(WorkerFeature):
    """Drafters of one worker; those without a model belong to the runner part."""

    draft: CausalLM | None = None
    """Draft model or draft heads, once loaded."""

    @classmethod
    def is_wanted(cls, config: EngineConfig) -> bool:
        return config.pooling is None

    @classmethod
    def step_bytes(cls, config: EngineConfig) -> int:
        return kept_bytes(config) + config.scheduler.max_num_batched_tokens * passing_bytes(config)

    @property
    def models(self) -> Sequence[CausalLM]:
        return () if self.draft is None else (self.draft,)

    @property
    def rehearsed_models(self) -> Sequence[CausalLM]:
        return () if uses_draft_heads(self._config) else self.models

    def load(self, model: CausalLM) -> None:
        """Load the draft model; it is on the last stage only, and not sharded."""
        self.draft = self._draft_of(self._config, model)

    def _draft_of(self, config: EngineConfig, model: CausalLM) -> CausalLM | None:
        if config.draft is None or not self._stage.is_last:
            return None
        draft = load_model(config.draft, prefix=DRAFT_PREFIX)
        if isinstance(draft, AutoregressiveHead):
            draft.share(model)
        return draft

    def prepare(self, config: EngineConfig, model: CausalLM) -> Callable[[], None]:
        """Load the draft model, whose weights may be new, too."""
        draft = self._draft_of(config, model)

        def use() -> None:
            self._config, self.draft = config, draft

        return use

    def unload(self) -> None:
        self.draft = None

    def make_part(self, context: RunnerContext) -> RunnerPart | None:
        """Return the part; a rehearsal runs draft heads as a part of the model's steps, and proposes nothing."""
        proposer = None
        if self.draft is not None and (uses_draft_heads(self._config) or not context.is_rehearsal):
            proposer = _make_proposer(self.draft, context)
        if context.is_rehearsal:
            return None if proposer is None else DraftingPart(None, proposer)
        config = context.config
        speculation = make_speculation(
            config,
            context.kv_config,
            context.batch,
            context.sampler,
            proposer,
            make_clocks(config, self._shard.group),
        )
        if speculation is None:
            return None
        part = DraftingPart(speculation, proposer)
        if is_calibrated(config, self._stage):
            part.calibration = Calibration(shapes_of(config), context.kv_config)
            part.clocks = group_clocks(self._shard.group)
        return part

    def close(self) -> None:
        self.draft = None


def _make_proposer(draft: CausalLM, context: RunnerContext) -> ModelProposer:
    """Build the draft model; on a device it runs eagerly, because its inputs have no fixed address."""
    config, device = context.config, context.device
    method, launched = config.speculative.settings.method, config
    assert method is not None, "a draft model needs a speculative method"
    if device.is_asynchronous:
        launched = replace(config, device=replace(config.device, enforce_eager=True))
    return MODEL_PROPOSERS[method](
        draft,
        context.batch,
        device.pipeline(draft, context.batch, launched, is_rehearsal=context.is_rehearsal),
        context.sampler,
        device.transfers,
        config=config,
        slice_size=context.slice_size,
    )


class DraftingPart(RunnerPart):
    """Drafts for the rows of one model runner.

    Args:
        speculation: proposes draft tokens; None: nothing is proposed, as while steps are timed.
        proposer: drafter with a model, which follows the steps.

    Attributes:
        calibration: steps that time the cost model; None: it is not calibrated.
        clocks: agree on durations among all ranks that run the calibration.
    """

    calibration: Calibration | None = None
    clocks: StepClocks | None = None

    def __init__(self, speculation: Speculation | None, proposer: ModelProposer | None = None) -> None:
        self.speculation = speculation
        self.proposer = proposer
        self._request_ids: dict[int, str] = {}
        self.reads_all_tokens = proposer is not None

    def add_request(self, row: int, request: NewRequestData) -> None:
        if self.proposer is not None:
            self.proposer.add_request(row, request)
        if self.speculation is not None:
            self._request_ids[row] = request.request_id
            self.speculation.add_request(request.request_id, request.num_prompt_tokens, request.owner)

    def remove_request(self, row: int) -> None:
        if self.proposer is not None:
            self.proposer.remove_request(row)
        if self.speculation is not None:
            self.speculation.remove_request(self._request_ids.pop(row))

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        if self.proposer is not None:
            self.proposer.follow(inputs, hidden)

    def compute(self, inputs: StepInputs, hidden: Tensor) -> StepPart | None:
        return None if self.speculation is None else self

    def complete(self, step: LaunchedStep, outcome: StepOutcome) -> None:
        """Record the step's cost, and add drafts for the next plan; none while speculation is paused."""
        speculation, sampled = self.speculation, step.sampled
        if speculation is None or sampled is None:
            return
        ids = step.request_ids
        verified = {
            ids[index]: Verified(len(drafts), len(outcome.token_ids[index]) - 1)
            for index, drafts in sampled.drafts.items()
        }
        took = step.marks.done.seconds_since(step.marks.started)
        speculation.note_step(verified, len(outcome.token_ids), step.width, took)
        if speculation.rests():
            return
        known = known_tokens(sampled, step.batch, outcome)
        outcome.drafts.update(speculation.propose({ids[index]: tokens for index, tokens in known.items()}))

    def calibrate(self, launch: Callable[[SchedulerOutput], LaunchedStep]) -> None:
        """Time some steps for the cost model; the speculation does not see them."""
        speculation, calibration, clocks = self.speculation, self.calibration, self.clocks
        if speculation is None or speculation.costs is None or calibration is None or clocks is None:
            return

        def timed(plan: SchedulerOutput) -> float:
            step = launch(plan)
            step.result()
            (seconds,) = clocks.agreed([step.marks.done.seconds_since(step.marks.started)])
            return seconds

        self.speculation = None
        try:
            calibration.run(timed, speculation.costs)
        finally:
            self.speculation = speculation


DRAFT_PREFIX = "draft."  # prefix of the draft model's layer names
MODEL_PROPOSERS: Mapping[str, Callable[..., ModelProposer]] = {
    DRAFT_MODEL: make_draft_model,
    MEDUSA: Medusa,
    EAGLE: HeadChain,
    EAGLE3: HeadChain,
    MTP: HeadChain,
}  # by method


def make_speculation(
    config: EngineConfig,
    kv_config: KVCacheConfig,
    batch: InputBatch,
    sampler: Sampler,
    proposer: ModelProposer | None = None,
    clocks: StepClocks | None = None,
) -> Speculation | None:
    """Return the drafters of this engine: jump-ahead, then those of `--speculative-config`.

    `proposer` is of the configured method, if it is one of `MODEL_PROPOSERS`; `clocks` decide the number of drafts.

    Raises:
        StartupError: the heads have layers that cannot roll back.
    """
    settings, drafters = config.speculative.settings, dict[str, Drafter]()
    if settings.method is not None:
        _check_states(config, kv_config)
    forced = jump_ahead(config, kv_config, batch, sampler)
    if forced is not None:
        drafters["jump_ahead"] = forced
    drafters |= make_drafters(config)
    if proposer is not None:
        drafters[settings.method or ""] = proposer

    def num_allowed(request_id: str, known: NDArray[np.int32], drafts: list[int]) -> int:
        return sampler.num_allowed(batch.row(request_id), known, drafts)

    if not drafters:
        return None
    return Speculation(
        drafters,
        most=settings.most_drafts,
        adaptive=settings.adaptive and settings.method is not None,
        num_ahead=config.num_tokens_ahead,
        allowed=num_allowed,
        clocks=clocks,
    )


def _check_states(config: EngineConfig, kv_config: KVCacheConfig) -> None:
    """Refuse heads with state layers: they compute each token again with the target's state.

    Raises:
        StartupError: such layers exist.
    """
    specs = (spec for name, spec in kv_config.layer_specs.items() if name.startswith(DRAFT_PREFIX))
    if uses_draft_heads(config) and not all(spec.rolls_back for spec in specs):
        raise StartupError(
            "--speculative-config: these draft heads have layers that keep a state, which cannot roll back after "
            "rejected drafts"
        )
