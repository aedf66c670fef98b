"""The feature that keeps a text to a grammar (`structured_outputs`).

Invariant: a mask is a function of the request's grammar and its tokens before the sample. A grammar that fails, or a
text from which nothing goes on, ends its own request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.structured_output.backend import EVERYTHING, GrammarError, Masks, Matcher
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.store import GrammarStore
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import Failures, LogitsFeature

LEFT = "structured_outputs: the text has left its grammar"


class StagedMask(NamedTuple):
    """Of U constrained samples."""

    users: Tensor
    """[U] of the step's samples."""
    words: Tensor
    """[U, ceil(V / 32)], as `ops.mask_logits` reads them."""
    endings: Tensor
    """[E] flat indices of an end for each text that is complete."""
    failed: Failures
    """Sample -> why its request cannot go on."""


class GrammarMask(LogitsFeature[StagedMask]):
    """Forbids every token after which the text could not be completed any more.

    Where the text is whole and nothing may follow, the end is taken, whatever other features say (`min_tokens`).
    """

    reads_tokens = True

    def __init__(self, batch: InputBatch, vocab_size: int, grammars: GrammarStore) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._texts: dict[int, ConstrainedText] = {}
        self._no_endings = torch.empty(0, dtype=torch.int64)

    def wants(self, params: SamplingParams) -> bool:
        return params.structured_outputs is not None

    def _store(self, row: int, request: NewRequestData) -> None:
        text = ConstrainedText(request, self._grammars, self._vocab_size)
        text.read(request.token_ids[request.num_prompt_tokens :])
        self._texts[row] = text

    def _forget(self, row: int) -> None:
        del self._texts[row]

    def forced_tokens(self, row: int, known: NDArray[np.int32]) -> list[int]:
        """One way to write all that can come behind a row's known tokens before there is a choice."""
        text = self._texts.get(row)
        return [] if text is None else text.forced_tokens(known)

    def num_allowed(self, row: int, known: NDArray[np.int32], drafts: Sequence[int]) -> int:
        """How many of some guesses, behind a row's known tokens, its grammar allows; all, if it has none."""
        text = self._texts.get(row)
        return len(drafts) if text is None else text.num_allowed(known, drafts)

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedMask:
        masks = Masks(len(users), self._vocab_size)
        endings, failed = list[int](), dict[int, str]()
        rows, columns = samples.rows[users], samples.columns[users]
        num_known = self._batch.num_tokens[rows]
        last = self._batch.token_ids[rows, num_known - 1].tolist()
        places = zip(users.tolist(), rows.tolist(), num_known.tolist(), columns.tolist(), strict=True)
        for place, (user, row, known, column) in enumerate(places):
            text = self._texts[row]
            if text.end == known - 1:
                text.read_one(last[place])
            elif text.end < known:
                text.read(self._tokens(row, text.end, known))
            drafts = self._tokens(row, known, column) if column > known else ()
            end = text.fill(masks, place, drafts)
            if end is not None:
                endings.append(user * self._vocab_size + end)
            if text.failure is not None:
                failed[user] = text.failure
        ends = torch.tensor(endings, dtype=torch.int64) if endings else self._no_endings
        return StagedMask(torch.from_numpy(users), torch.from_numpy(masks.words), ends, failed)

    def _tokens(self, row: int, start: int, end: int) -> list[int]:
        tokens: list[int] = self._batch.token_ids[row, start:end].tolist()
        return tokens

    def apply(self, logits: Tensor, staged: StagedMask) -> Failures:
        ops.mask_logits(logits, staged.users, staged.words)
        if len(staged.endings):
            logits.view(-1)[staged.endings] = 0.0
        return staged.failed


class ConstrainedText:
    """What one request has generated so far, under its grammar.

    Args:
        request: with the ids that end it; `ignore_eos` makes it end where nothing else is possible only.

    Attributes:
        end: column of the row up to which its tokens were read.
        failure: why the request cannot go on, once it cannot.
    """

    def __init__(self, request: NewRequestData, grammars: GrammarStore, vocab_size: int) -> None:
        params = request.sampling_params
        assert params.structured_outputs is not None
        self._params: StructuredOutputsParams = params.structured_outputs
        self._grammars = grammars
        self._ignores_ends = params.ignore_eos
        self._end_ids = [token_id for token_id in request.eos_token_ids if token_id < vocab_size]
        self._end_masks = Masks(1, vocab_size)
        self._end_masks.set_only(0, self._end_ids)
        self._has_ended = False
        self._tokens: list[int] = []
        self.end = request.num_prompt_tokens
        self.failure: str | None = None
        self._matcher: Matcher | None = None
        self._start(shared=True)

    def read(self, token_ids: list[int]) -> None:
        """Step over tokens that were generated."""
        self.end += len(token_ids)
        self._tokens += token_ids
        self._advance(token_ids)

    def read_one(self, token_id: int) -> None:
        """The same for one token, which is the rule."""
        self.end += 1
        self._tokens.append(token_id)
        if self.failure is None and not self._step(token_id):
            self.failure = LEFT

    def forced_tokens(self, known: NDArray[np.int32]) -> list[int]:
        """One way to write what must come next, of a request with these tokens; none if it has read further."""
        if not self._reads_up_to(known) or self._has_ended or self._matcher is None:
            return []
        try:
            return self._matcher.forced_tokens()
        except GrammarError:  # it comes again with the next mask, where it is dealt with
            return []

    def num_allowed(self, known: NDArray[np.int32], drafts: Sequence[int]) -> int:
        """How many of some guesses may follow these tokens; none if it has read further."""
        if not self._reads_up_to(known):
            return 0
        try:
            with self._behind(drafts) as num_allowed:
                return num_allowed
        except GrammarError:  # as above
            return 0

    def _reads_up_to(self, known: NDArray[np.int32]) -> bool:
        """Read a request's tokens, unless it has read others behind them; whether the text is one of the grammar."""
        if self.end > len(known):
            return False
        self.read(known[self.end :].tolist())
        return self.failure is None

    @contextmanager
    def _behind(self, drafts: Sequence[int]) -> Iterator[int]:
        """Be behind those of some guesses that are allowed here, which are so many of the first, for a while."""
        had_ended, num_allowed, num_read = self._has_ended, 0, 0
        try:
            for draft in drafts:
                if not self._step(draft):
                    break
                num_allowed += 1
                num_read += not self._has_ended
            yield num_allowed
        finally:
            self._has_ended = had_ended
            if num_read and self._matcher is not None:
                self._matcher.rollback(num_read)

    def fill(self, masks: Masks, place: int, drafts: Sequence[int] = ()) -> int | None:
        """Write what may follow these drafts; returns an end if the text is complete there.

        Behind a draft that is not allowed everything may come, because nothing will: it is not what is sampled there.
        """
        if self.failure is not None or self._matcher is None:
            return None
        try:
            return self._fill_behind(masks, place, drafts) if drafts else self._fill_here(masks, place)
        except GrammarError as error:
            masks.words[place] = EVERYTHING
            return self._fill_alone(masks, place, drafts, error)

    def _fill_alone(self, masks: Masks, place: int, drafts: Sequence[int], error: GrammarError) -> int | None:
        """What others did with a grammar's shared states must not end this text: once more, without them."""
        if error.exhausted:
            self._grammars.renew(self._params)
            self._start(shared=False)
            self._advance(self._tokens)
            try:
                return None if self._matcher is None else self._fill_behind(masks, place, drafts)
            except GrammarError as last:
                masks.words[place] = EVERYTHING
                error = last
        self.failure = f"structured_outputs: {error}"
        return None

    def _fill_behind(self, masks: Masks, place: int, drafts: Sequence[int]) -> int | None:
        with self._behind(drafts) as num_allowed:
            return self._fill_here(masks, place) if num_allowed == len(drafts) else None

    def _fill_here(self, masks: Masks, place: int) -> int | None:
        matcher = self._matcher
        assert matcher is not None
        if not (self._has_ended or matcher.is_complete):
            matcher.fill(masks, place)
            if not self._ignores_ends or masks.forbid(place, self._end_ids):
                return None
        masks.words[place] = self._end_masks.words[0]
        return self._end_ids[0] if self._end_ids else None

    def _advance(self, token_ids: Sequence[int]) -> None:
        if self.failure is None and not all(map(self._step, token_ids)):
            self.failure = LEFT

    def _step(self, token_id: int) -> bool:
        """Whether a token is allowed here, and then be behind it."""
        assert self._matcher is not None
        if token_id in self._end_ids:
            self._has_ended = self._has_ended or self._matcher.may_end
            return self._has_ended
        return not self._has_ended and self._matcher.advance(token_id)

    def _start(self, *, shared: bool) -> None:
        self._has_ended = False
        try:
            self._matcher = self._grammars.matcher(self._params, shared=shared)
        except GrammarError as error:
            self._matcher, self.failure = None, f"structured_outputs: {error}"
