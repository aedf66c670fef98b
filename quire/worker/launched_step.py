"""A step that was launched, and how its result is read when the device is done.

Invariant: the result is read once, and with it the host's rows get the tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.output import ModelRunnerOutput, TokenLogprobs
from quire.spec_decode.speculation import Speculation, Verified
from quire.worker.devices import Mark
from quire.worker.drafts import count_kept
from quire.worker.input_batch import InputBatch, TokenPlaces
from quire.worker.pooling import PooledNumbers
from quire.worker.prompt_logprobs import PromptEntries
from quire.worker.sampler import NON_FINITE, SamplerOutput
from quire.worker.sampling import SampledPart

Value = TypeVar("Value")

_NON_FINITE_NUMBERS = "the model gave numbers that are not finite"


class Marks(NamedTuple):
    """Of a step: before it, behind its forward pass, and behind all that was downloaded."""

    started: Mark
    forwarded: Mark
    done: Mark


class Outcome(NamedTuple):
    """What requests get of a step, by their indices in it."""

    token_ids: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]]
    failed: dict[int, str]


class SampledTokens(NamedTuple):
    """What the requests of a step sampled, on its way to the host."""

    indices: NDArray[np.int64]
    """[N] index, in the step, of each sample's request."""
    parts: Sequence[SampledPart]
    """Some samples each, in order."""
    places: TokenPlaces
    """[N] of the tokens in the host's rows."""
    drafts: dict[int, list[int]]
    """Those that were verified, by the requests' indices."""
    further: Sequence[NDArray[np.int64]] = ()
    """[N] of each further round: what followed these tokens, and so on."""
    further_s: float = 0.0
    """What these rounds took, nearly all of it in their passes."""

    def read(self, batch: InputBatch) -> Outcome:
        """The batch gets the tokens."""
        output = self._join()
        batch.set_tokens(self.places, output.token_ids)
        if self.drafts:
            return self._verified(output, batch)
        for count, token_ids in enumerate(self.further, 1):
            batch.set_tokens(self.places._replace(columns=self.places.columns + count), token_ids)
        indices, rounds = self.indices.tolist(), (output.token_ids, *self.further)
        tokens = [list(of_request) for of_request in zip(*(one.tolist() for one in rounds), strict=True)]
        return Outcome(
            dict(zip(indices, tokens, strict=True)),
            {indices[sample]: [entry] for sample, entry in output.logprobs.items()},
            {indices[sample]: reason for sample, reason in output.failed.items()},
        )

    def known_tokens(self, batch: InputBatch, outcome: Outcome) -> dict[int, NDArray[np.int32]]:
        """All tokens up to those of the outcome, of the requests that go on."""
        indices, firsts = self._firsts()
        rows, columns, generations, _ = self.places.at(firsts)
        return {
            index: batch.token_ids[row, : column + len(outcome.token_ids[index])]
            for index, row, column, generation in zip(
                indices.tolist(), rows, columns, generations, strict=True
            )
            if index not in outcome.failed and generation == batch.generations[row]
        }

    def _firsts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[R] each request that sampled, and its first sample: those of one follow each other."""
        is_first = np.ones(len(self.indices), dtype=np.bool_)
        np.not_equal(self.indices[1:], self.indices[:-1], out=is_first[1:])
        firsts = is_first.nonzero()[0]
        return self.indices[firsts], firsts

    def _join(self) -> SamplerOutput:
        """Of all N samples."""
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

    def _verified(self, output: SamplerOutput, batch: InputBatch) -> Outcome:
        """The same where some requests have drafts, and so several samples, of which the first ones count."""
        outcome, tokens = Outcome({}, {}, {}), output.token_ids.tolist()
        indices, firsts = self._firsts()
        for index, first in zip(indices.tolist(), firsts.tolist(), strict=True):
            drafts = self.drafts.get(index, [])
            is_bad = [sample in output.failed for sample in range(first, first + 1 + len(drafts))]
            sampled = tokens[first : first + 1 + len(drafts)]
            outcome.token_ids[index] = sampled[: count_kept(sampled, drafts, is_bad)]
            if first in output.failed:
                outcome.failed[index] = output.failed[first]
            if first in output.logprobs:
                last = first + len(outcome.token_ids[index])
                outcome.logprobs[index] = [output.logprobs[sample] for sample in range(first, last)]
        drafted = [place for place, index in enumerate(indices.tolist()) if index in self.drafts]
        num_kept = [len(outcome.token_ids[index]) for index in indices[drafted].tolist()]
        batch.keep(self.places.at(firsts[drafted]), np.array(num_kept))
        return outcome


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
    pooled: list[PooledNumbers] = field(default_factory=list)
    speculation: Speculation | None = None
    width: int = 0
    """Tokens that it computes; 0 if it does more than to generate."""
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
        ids, outcome, further_s = self.request_ids, Outcome({}, {}, {}), 0.0
        if self.sampled is not None:
            outcome, further_s = self.sampled.read(self.batch), self.sampled.further_s
        failed = outcome.failed
        prompts = {prompt.request: prompt.read() for prompt in self.prompts}
        failed.update({index: NON_FINITE for index, entries in prompts.items() if entries is None})
        found = {index: entries for index, entries in prompts.items() if entries is not None}
        pooled = {one.request: one.read() for one in self.pooled}
        failed.update({index: _NON_FINITE_NUMBERS for index, numbers in pooled.items() if numbers is None})
        numbers = {index: one for index, one in pooled.items() if one is not None}

        def by_id(values: Mapping[int, Value]) -> dict[str, Value]:
            return {ids[index]: value for index, value in values.items() if index not in failed}

        return ModelRunnerOutput(
            step_id=self.step_id,
            sampled_token_ids=by_id(outcome.token_ids),
            logprobs=by_id(outcome.logprobs),
            prompt_logprobs=by_id(found),
            pooled=by_id(numbers),
            failed=self.unusable | {ids[index]: reason for index, reason in failed.items()},
            draft_token_ids=self._propose(outcome),
            forward_s=self.marks.forwarded.seconds_since(self.marks.started) + further_s,
            sample_s=self.marks.done.seconds_since(self.marks.forwarded) - further_s,
        )

    def _propose(self, outcome: Outcome) -> dict[str, list[int]]:
        """Drafts to follow what was sampled, if somebody guesses; while guessing rests, little is looked at."""
        if self.speculation is None or self.sampled is None:
            return {}
        ids = self.request_ids
        verified = {
            ids[index]: Verified(len(drafts), len(outcome.token_ids[index]) - 1)
            for index, drafts in self.sampled.drafts.items()
        }
        took = self.marks.done.seconds_since(self.marks.started)
        self.speculation.note_step(verified, len(outcome.token_ids), self.width, took)
        if self.speculation.rests():
            return {}
        known = self.sampled.known_tokens(self.batch, outcome)
        return self.speculation.propose({ids[index]: tokens for index, tokens in known.items()})
