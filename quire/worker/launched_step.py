# SPDX-License-Identifier: Apache-2.0
"""Step in flight on the device, from its launch to its result.

Invariant: a result is read once, and reading it writes the sampled tokens to the host's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.output import ModelRunnerOutput, Pooled, TokenLogprobs
from quire.worker.input_batch import InputBatch, TokenPlaces
from quire.worker.prompt_logprobs import PromptEntries
from quire.worker.sampler import NON_FINITE, SamplerOutput
from quire.worker.sampling import SampledPart
from quire.worker.transfers import Mark
from quire.worker.verification import read_verified

Value = TypeVar("Value")


class StepMarks(NamedTuple):
    """Device marks of a step: before it, after its forward pass, and after all downloads."""

    started: Mark
    forwarded: Mark
    done: Mark


@dataclass(slots=True)
class StepOutcome:
    """Results of a step, by request index within the step."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    pooled: dict[int, Pooled] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Drafts for the next plan, by request id."""


class SampledTokens(NamedTuple):
    """Samples of a step on their way to the host."""

    indices: NDArray[np.int64]
    """[N] index, in the step, of each sample's request."""
    parts: Sequence[SampledPart]
    """Parts of the samples, in order."""
    places: TokenPlaces
    """[N] places of the tokens in the host's rows."""
    drafts: dict[int, list[int]]
    """Verified drafts, by request index."""
    further: Sequence[NDArray[np.int64]] = ()
    """[N] tokens of each further multi-step decode round."""
    further_s: float = 0.0
    """Seconds of these rounds, nearly all of it forward passes."""

    def read(self, batch: InputBatch) -> StepOutcome:
        """Write the downloaded tokens to the batch and return the outcome."""
        output = self._join()
        batch.set_tokens(self.places, output.token_ids)
        if self.drafts:
            outcome = StepOutcome()
            read_verified(self, output, batch, outcome)
            return outcome
        for count, token_ids in enumerate(self.further, 1):
            batch.set_tokens(self.places._replace(columns=self.places.columns + count), token_ids)
        indices, rounds = self.indices.tolist(), (output.token_ids, *self.further)
        tokens = [list(of_request) for of_request in zip(*(one.tolist() for one in rounds), strict=True)]
        return StepOutcome(
            dict(zip(indices, tokens, strict=True)),
            {indices[sample]: [entry] for sample, entry in output.logprobs.items()},
            {indices[sample]: reason for sample, reason in output.failed.items()},
        )

    def _join(self) -> SamplerOutput:
        """Concatenate the parts to the output of all N samples."""
        outputs = [part.read() for part in self.parts]
        if len(outputs) == 1:
            return outputs[0]
        joined = SamplerOutput(np.zeros(len(self.indices), dtype=np.int64), {}, {})
        first = 0
        for token_ids, logprobs, failed in outputs:
            joined.token_ids[first : first + len(token_ids)] = token_ids
            joined.logprobs.update({first + sample: entry for sample, entry in logprobs.items()})
            joined.failed.update({first + sample: reason for sample, reason in failed.items()})
            first += len(token_ids)
        return joined


class StepPart(Protocol):
    """Part of a launched step that belongs to a feature."""

    def complete(self, step: LaunchedStep, outcome: StepOutcome) -> None:
        """Add the feature's results to the outcome, once the step's downloads have arrived."""


@dataclass(eq=False, slots=True)
class LaunchedStep:
    """Launched step, whose result is read when the device is done."""

    step_id: int
    request_ids: list[str]
    """Requests of the step, in its order."""
    unusable: dict[str, str]
    """Requests that got no row, with the reason."""
    marks: StepMarks
    batch: InputBatch
    sampled: SampledTokens | None = None
    prompts: list[PromptEntries] = field(default_factory=list)
    parts: Sequence[StepPart] = ()
    """Parts of features, which complete the outcome in this order."""
    width: int = 0
    """Tokens computed; 0 if the step also computes prompts."""
    _result: ModelRunnerOutput | None = None

    @property
    def is_read(self) -> bool:
        return self._result is not None

    def result(self) -> ModelRunnerOutput:
        """Wait for the device and return the output; further calls return the same output."""
        if self._result is None:
            self.marks.done.wait()
            self._result = self._read()
        return self._result

    def _read(self) -> ModelRunnerOutput:
        ids, outcome, further_s = self.request_ids, StepOutcome(), 0.0
        if self.sampled is not None:
            outcome, further_s = self.sampled.read(self.batch), self.sampled.further_s
        failed = outcome.failed
        prompts = {prompt.request: prompt.read() for prompt in self.prompts}
        failed.update({index: NON_FINITE for index, entries in prompts.items() if entries is None})
        found = {index: entries for index, entries in prompts.items() if entries is not None}
        for part in self.parts:
            part.complete(self, outcome)

        def by_id(values: Mapping[int, Value]) -> dict[str, Value]:
            return {ids[index]: value for index, value in values.items() if index not in failed}

        return ModelRunnerOutput(
            step_id=self.step_id,
            sampled_token_ids=by_id(outcome.token_ids),
            logprobs=by_id(outcome.logprobs),
            prompt_logprobs=by_id(found),
            pooled=by_id(outcome.pooled),
            failed=self.unusable | {ids[index]: reason for index, reason in failed.items()},
            draft_token_ids=outcome.drafts,
            forward_s=self.marks.forwarded.seconds_since(self.marks.started) + further_s,
            sample_s=self.marks.done.seconds_since(self.marks.forwarded) - further_s,
        )
