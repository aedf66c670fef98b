"""A step that was launched, and how its result is read when the device is done.

Invariant: the result is read once, and with it the host's rows get the tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.output import ModelRunnerOutput, TokenLogprobs
from quire.worker.devices import Mark
from quire.worker.input_batch import InputBatch, TokenPlaces
from quire.worker.prompt_logprobs import PromptEntries
from quire.worker.sampler import NON_FINITE, Sampled

Value = TypeVar("Value")


class Marks(NamedTuple):
    """Of a step: before it, behind its forward pass, and behind all that was downloaded."""

    started: Mark
    forwarded: Mark
    done: Mark


class SampledTokens(NamedTuple):
    """What the requests of a step sampled, on its way to the host."""

    indices: NDArray[np.int64]
    """[N] of the requests in the step."""
    parts: list[Sampled]
    """Of some of them each, in order."""
    places: TokenPlaces
    """[N] of the tokens in the host's rows."""

    def read(self, batch: InputBatch) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
        """[N] token ids, and logprobs and reasons of failure by the requests' indices; the batch gets the tokens."""
        token_ids: list[NDArray[np.int64]] = []
        logprobs: dict[int, TokenLogprobs] = {}
        failed: dict[int, str] = {}
        rest = self.indices
        for part in self.parts:
            output = part.read()
            token_ids.append(output.token_ids)
            logprobs |= {int(rest[row]): entry for row, entry in output.logprobs.items()}
            failed |= {int(rest[row]): reason for row, reason in output.failed.items()}
            rest = rest[len(output.token_ids) :]
        if not token_ids:
            return [], {}, {}
        tokens = token_ids[0] if len(token_ids) == 1 else np.concatenate(token_ids)
        batch.set_tokens(self.places, tokens)
        return tokens.tolist(), logprobs, failed


@dataclass(eq=False, slots=True)
class LaunchedStep:
    """What the result of a step is made of."""

    step_id: int
    request_ids: list[str]
    """Of the step's requests, in its order."""
    unusable: dict[str, str]
    """Requests that could not have a row, with the reason."""
    marks: Marks
    batch: InputBatch
    sampled: SampledTokens | None = None
    prompts: list[PromptEntries] = field(default_factory=list)
    _result: ModelRunnerOutput | None = None

    @property
    def is_read(self) -> bool:
        return self._result is not None

    def result(self) -> ModelRunnerOutput:
        """Wait for the device, and read."""
        if self._result is None:
            self.marks.done.wait()
            self._result = self._read()
        return self._result

    def _read(self) -> ModelRunnerOutput:
        ids, sampled = self.request_ids, self.sampled
        tokens, logprobs, failed = ([], {}, {}) if sampled is None else sampled.read(self.batch)
        indices = [] if sampled is None else sampled.indices.tolist()
        prompts = {prompt.request: prompt.read() for prompt in self.prompts}
        failed |= {index: NON_FINITE for index, entries in prompts.items() if entries is None}
        found = {index: entries for index, entries in prompts.items() if entries is not None}

        def by_id(values: Mapping[int, Value]) -> dict[str, Value]:
            return {ids[index]: value for index, value in values.items() if index not in failed}

        return ModelRunnerOutput(
            step_id=self.step_id,
            sampled_token_ids=by_id({index: [token] for index, token in zip(indices, tokens, strict=True)}),
            logprobs=by_id({index: [entry] for index, entry in logprobs.items()}),
            prompt_logprobs=by_id(found),
            failed=self.unusable | {ids[index]: reason for index, reason in failed.items()},
            forward_s=self.marks.forwarded.seconds_since(self.marks.started),
            sample_s=self.marks.done.seconds_since(self.marks.forwarded),
        )
