# SPDX-License-Identifier: Apache-2.0
"""Features that mask or bias given tokens: custom logits processors, `thinking_token_budget`, `allowed_token_ids`,
`min_tokens`, `logit_bias` and `bad_words`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import FOREIGN_WORDS
from quire.logits_processors import LogitsProcessor, RequestLogitsProcessor
from quire.sampling_extras import ThinkingMarkers
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import Failures, LogitsFeature, flat_indices

logger = logging.getLogger(__name__)


class _ProcessorCall(NamedTuple):
    """Processor calls for one sample."""

    sample: int
    processors: list[RequestLogitsProcessor]
    prompt_ids: list[int]
    output_ids: list[int]


class StagedCalls(NamedTuple):
    calls: list[_ProcessorCall]


class CustomProcessors(LogitsFeature[StagedCalls]):
    """Logits processors (`quire.logits_processors`): the engine's in the configured order, then the request's.

    Invariant: an exception or invalid logits fail only the request that the processor was called for.
    """

    reads_tokens = True

    def __init__(
        self, batch: InputBatch, vocab_size: int, processors: Sequence[LogitsProcessor] = ()
    ) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._engine_wide = processors
        self._processors: dict[int, list[RequestLogitsProcessor]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return bool(self._engine_wide or params.logits_processors)

    def _store(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        found = [_bind_to_request(processor, params) for processor in self._engine_wide]
        own = list(params.logits_processors)
        self._processors[row] = [*(one for one in found if one is not None), *own]

    def _forget(self, row: int) -> None:
        del self._processors[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedCalls | None:
        calls = []
        for sample in users.tolist():
            row, column = int(samples.rows[sample]), int(samples.columns[sample])
            processors, num_prompt = self._processors[row], int(self._batch.num_prompt_tokens[row])
            if processors:
                tokens = self._batch.token_ids[row, :column].tolist()
                calls.append(_ProcessorCall(sample, processors, tokens[:num_prompt], tokens[num_prompt:]))
        return StagedCalls(calls) if calls else None

    def apply(self, logits: Tensor, staged: StagedCalls) -> Failures | None:
        failures: Failures = {}
        for call in staged.calls:
            row = logits[call.sample]
            failure = _run(call, row)
            if failure is not None:
                failures[call.sample] = failure
                row.zero_()
        return failures or None


def _bind_to_request(processor: LogitsProcessor, params: SamplingParams) -> RequestLogitsProcessor | None:
    """Return the processor of a request, or None; an error is raised later, when it would be called."""
    try:
        return processor.for_request(params)
    except Exception as error:
        cause = error

        def fail(_prompt_ids: list[int], _output_ids: list[int], _logits: Tensor) -> None:
            raise cause

        return fail


def _run(call: _ProcessorCall, row: Tensor) -> str | None:
    """Call all processors of a sample on its logits [V]; return the failure or None."""
    for processor in call.processors:
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        try:
            changed = processor(list(call.prompt_ids), list(call.output_ids), row)
            if changed is not None and changed is not row:
                if changed.shape != row.shape:
                    raise ValueError(f"it returned logits of shape {tuple(changed.shape)}")
                row.copy_(changed)
        except Exception as error:
            logger.exception("the logits processor %s failed", name)
            return f"the logits processor {name} failed{FOREIGN_WORDS}{type(error).__name__}: {error}"
        highest = row.amax().item()
        if not highest < np.inf:  # amax propagates NaN
            return f"the logits processor {name} returned logits that are NaN or infinite"
    return None


class SectionState(NamedTuple):
    """State of reasoning sections at the end of a token sequence."""

    is_inside: bool
    """True inside a section."""
    num_generated: int
    """Generated tokens of that section."""
    tail: tuple[int, ...]
    """Last tokens since the last marker, which may begin the next marker."""


class TokenSection:
    """Tracker of sections in a token sequence: `start_ids` opens one, `end_ids` closes it."""

    def __init__(self, markers: ThinkingMarkers, budget: int) -> None:
        self._markers = markers
        self._budget = budget
        self._longest = max(len(markers.start_ids), len(markers.end_ids))

    def after_prompt(self, tokens: NDArray[np.int32]) -> SectionState:
        """Return the state after a prompt, whose tokens do not count."""
        start, end = self._markers.start_ids, self._markers.end_ids
        if self._markers.starts_open is not None:
            return SectionState(self._markers.starts_open, 0, ())
        place = SectionState(False, 0, ())
        if len(start) == len(end) == 1 and start != end:  # single-token markers: the last one decides
            marks = np.flatnonzero((tokens == start[0]) | (tokens == end[0]))
            last = int(marks[-1]) if len(marks) else -1
            return place._replace(is_inside=bool(last >= 0 and tokens[last] == start[0]))
        for token in tokens.tolist():
            place = self.next(place, token)._replace(num_generated=0)
        return place

    def next(self, place: SectionState, token: int) -> SectionState:
        """Return the state after one more generated token."""
        tail = (*place.tail, token)
        marker = self._markers.end_ids if place.is_inside else self._markers.start_ids
        if tail[-len(marker) :] == marker:
            return SectionState(not place.is_inside, 0, ())
        return SectionState(place.is_inside, place.num_generated + place.is_inside, tail[-self._longest :])

    def forced(self, place: SectionState) -> int | None:
        """Return the token that must come next, or None."""
        if not place.is_inside or place.num_generated < self._budget:
            return None
        end = self._markers.end_ids
        begun = next(k for k in range(len(end) - 1, -1, -1) if k == 0 or place.tail[-k:] == end[:k])
        return end[begun]


class _SectionRow:
    """Section state of a request, after its first `num_followed` tokens."""

    def __init__(self, section: TokenSection, tokens: NDArray[np.int32], num_prompt_tokens: int) -> None:
        self.section = section
        self.place = section.after_prompt(tokens[:num_prompt_tokens])
        self.num_followed = num_prompt_tokens

    def follow(self, tokens: NDArray[np.int32], num_tokens: int) -> None:
        """Add what was generated up to `num_tokens`."""
        self.place = self.place_behind(tokens[:num_tokens])
        self.num_followed = max(self.num_followed, num_tokens)

    def place_behind(self, tokens: NDArray[np.int32]) -> SectionState:
        """Return the state after these tokens; the last may be drafts."""
        place = self.place
        for token in tokens[self.num_followed :].tolist():
            place = self.section.next(place, token)
        return place


class StagedForce(NamedTuple):
    users: Tensor
    """[U] of the step's samples."""
    token_ids: Tensor
    """[U] forced token of each."""


class ThinkingBudget(LogitsFeature[StagedForce]):
    """Forces the end marker of reasoning once the budget is used up, whatever else forbids it.

    Invariant: the forced token is a function of the tokens before it. An end marker that the model has begun is
    completed, not begun again.
    """

    reads_tokens = True

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._rows: dict[int, _SectionRow] = {}

    def wants(self, params: SamplingParams) -> bool:
        return params.thinking_token_budget is not None

    def _store(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        assert params.thinking_markers is not None
        assert params.thinking_token_budget is not None
        section = TokenSection(params.thinking_markers, params.thinking_token_budget)
        tokens = np.array(request.token_ids, dtype=np.int32)
        self._rows[row] = _SectionRow(section, tokens, request.num_prompt_tokens)

    def _forget(self, row: int) -> None:
        del self._rows[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedForce | None:
        forced = {int(i): self._forced(int(samples.rows[i]), int(samples.columns[i])) for i in users}
        found = {i: token for i, token in forced.items() if token is not None}
        return StagedForce(_ids(list(found)), _ids(list(found.values()))) if found else None

    def _forced(self, row: int, column: int) -> int | None:
        mine, tokens = self._rows[row], self._batch.token_ids[row]
        mine.follow(tokens, min(int(self._batch.num_tokens[row]), column))
        return mine.section.forced(mine.place_behind(tokens[:column]))

    def apply(self, logits: Tensor, staged: StagedForce) -> None:
        logits.index_fill_(0, staged.users, -torch.inf)
        logits[staged.users, staged.token_ids] = 0.0


def _ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class StagedIds(NamedTuple):
    """Token ids of some samples."""

    users: Tensor
    """[U] of the step's samples."""
    flat: Tensor
    """[M] indices into the flattened logits."""


class AllowedTokenIds(LogitsFeature[StagedIds]):
    """Mask of every token that is not allowed."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._vocab_size = vocab_size
        self._ids: dict[int, NDArray[np.int64]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def _store(self, row: int, request: NewRequestData) -> None:
        self._ids[row] = np.unique(np.array(request.sampling_params.allowed_token_ids, dtype=np.int64))

    def _forget(self, row: int) -> None:
        del self._ids[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedIds:
        ids = [self._ids[row] for row in samples.rows[users].tolist()]
        return StagedIds(torch.from_numpy(users), flat_indices(users, ids, self._vocab_size))

    def apply(self, logits: Tensor, staged: StagedIds) -> None:
        kept = logits.view(-1)[staged.flat]
        logits.index_fill_(0, staged.users, -torch.inf)
        logits.view(-1)[staged.flat] = kept


class MinTokens(LogitsFeature[StagedIds]):
    """Mask of end-of-sequence and stop tokens before `min_tokens`; `ignore_eos` does not lift it."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._vocab_size = vocab_size
        self._min_tokens = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self._ids: dict[int, NDArray[np.int64]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def _store(self, row: int, request: NewRequestData) -> None:
        stops = {*request.eos_token_ids, *request.sampling_params.stop_token_ids}
        # A stop id outside the vocabulary is harmless: it can never be generated.
        known = sorted(token_id for token_id in stops if 0 <= token_id < self._vocab_size)
        self._ids[row] = np.array(known, dtype=np.int64)
        self._min_tokens[row] = request.sampling_params.min_tokens

    def _forget(self, row: int) -> None:
        del self._ids[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedIds | None:
        is_short = self._batch.output_indices(samples)[users] < self._min_tokens[samples.rows[users]]
        short = users[is_short]
        if not len(short):
            return None
        ids = [self._ids[row] for row in samples.rows[short].tolist()]
        return StagedIds(torch.from_numpy(short), flat_indices(short, ids, self._vocab_size))

    def apply(self, logits: Tensor, staged: StagedIds) -> None:
        logits.view(-1)[staged.flat] = -torch.inf


class StagedBias(NamedTuple):
    flat: Tensor
    """[M] indices into the flattened logits."""
    values: Tensor
    """[M] float32."""


class LogitBias(LogitsFeature[StagedBias]):
    """Bias added to the logits of given tokens."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._vocab_size = vocab_size
        self._ids: dict[int, NDArray[np.int64]] = {}
        self._values: dict[int, NDArray[np.float32]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def _store(self, row: int, request: NewRequestData) -> None:
        bias = request.sampling_params.logit_bias or {}
        self._ids[row] = np.array(list(bias.keys()), dtype=np.int64)
        self._values[row] = np.array(list(bias.values()), dtype=np.float32)

    def _forget(self, row: int) -> None:
        del self._ids[row], self._values[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedBias:
        used_rows = samples.rows[users].tolist()
        flat = flat_indices(users, [self._ids[row] for row in used_rows], self._vocab_size)
        return StagedBias(flat, torch.from_numpy(np.concatenate([self._values[row] for row in used_rows])))

    def apply(self, logits: Tensor, staged: StagedBias) -> None:
        logits.view(-1)[staged.flat] += staged.values


class WordTable(NamedTuple):
    """Bad words of one request, by their last token but one."""

    single: list[int]
    """Words of one token."""
    longer: dict[int, list[tuple[list[int], int]]]
    """Last token but one -> (all tokens but the last, the last)."""
    longest: int
    """Tokens of the longest word, less one."""

    @staticmethod
    def from_words(words: Sequence[Sequence[int]]) -> WordTable:
        longer: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                longer.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        single = [word[0] for word in words if len(word) == 1]
        return WordTable(single, longer, max(map(len, words)) - 1)

    def forbidden_after(self, output: list[int]) -> list[int]:
        """Return the tokens that would complete a word after the last `longest` tokens of an output."""
        begun = self.longer.get(output[-1], []) if output else []
        ends = [last for start, last in begun if output[-len(start) :] == start]
        return list(dict.fromkeys([*self.single, *ends]))


class BadWords(LogitsFeature[StagedIds]):
    """Mask of tokens that would complete a bad word.

    Invariant: it is a function of the generated tokens before it; the prompt does not count.
    """

    reads_tokens = True

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._vocab_size = vocab_size
        self._tables: dict[int, WordTable] = {}

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.bad_words_token_ids)

    def _store(self, row: int, request: NewRequestData) -> None:
        self._tables[row] = WordTable.from_words(request.sampling_params.bad_words_token_ids)

    def _forget(self, row: int) -> None:
        del self._tables[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedIds | None:
        forbidden = [self._forbidden(int(samples.rows[i]), int(samples.columns[i])) for i in users]
        flat = flat_indices(users, forbidden, self._vocab_size)
        return StagedIds(torch.from_numpy(users), flat) if len(flat) else None

    def _forbidden(self, row: int, column: int) -> NDArray[np.int64]:
        table = self._tables[row]
        start = max(int(self._batch.num_prompt_tokens[row]), column - table.longest)
        output: list[int] = self._batch.token_ids[row, start:column].tolist()
        return np.array(table.forbidden_after(output), dtype=np.int64)

    def apply(self, logits: Tensor, staged: StagedIds) -> None:
        logits.view(-1)[staged.flat] = -torch.inf
