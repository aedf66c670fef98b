# SPDX-License-Identifier: Apache-2.0
"""Sampling feature that enforces a grammar (`structured_outputs`).

Invariant: a mask is a function of the request's grammar and its tokens before the sample. A failing grammar, or a text
that nothing can continue, ends only its own request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.layers.shard import Shard
from quire.models.stages import Stage
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.structured_output.backend import EVERYTHING, GrammarError, Masks, Matcher
from quire.structured_output.store import GrammarStore
from quire.structured_outputs_params import FAULT, StructuredOutputsParams
from quire.worker.devices import Device
from quire.worker.feature import WorkerFeature
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import Failures, LogitsFeature

LEFT = (
    "the text has left its grammar (structured_outputs)"  # an internal bug, unlike what begins with `FAULT`
)


class StagedMask(NamedTuple):
    """Masks of U constrained samples."""

    users: Tensor
    """[U] of the step's samples."""
    words: Tensor
    """[U, ceil(V / 32)], as `ops.mask_logits` reads them."""
    endings: Tensor
    """[E] flat index of the end token of each complete text."""
    failed: Failures
    """Failure reasons by sample."""


class FilledMask(NamedTuple):
    """Result of one mask."""

    end: int | None = None
    """Token that ends the text, if nothing else may follow."""
    failure: str | None = None
    """Reason why no token can be sampled with this mask."""


class GrammarMask(LogitsFeature[StagedMask]):
    """Mask of all tokens after which the text could no longer be completed.

    A complete text that nothing may follow ends, whatever other features say (`min_tokens`).
    """

    reads_tokens = True
    limits_drafts = True

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
        self._texts.pop(row).leave()

    def forced_tokens(self, row: int, known: NDArray[np.int32]) -> list[int]:
        """Return one tokenization of what the grammar forces after a row's known tokens."""
        text = self._texts.get(row)
        return [] if text is None else text.forced_tokens(known)

    def num_allowed(self, row: int, known: NDArray[np.int32], drafts: Sequence[int]) -> int:
        """Return how many leading drafts after a row's known tokens its grammar allows; all without a grammar."""
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
            unread = [last[place]] if text.end == known - 1 else self._tokens(row, text.end, known)
            drafts = self._tokens(row, known, column) if column > known else ()
            filled = text.fill(masks, place, unread, drafts)
            if filled.end is not None:
                endings.append(user * self._vocab_size + filled.end)
            if filled.failure is not None:
                failed[user] = filled.failure
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


class WorkerGrammars(WorkerFeature):
    """Grammars of one worker's requests."""

    def __init__(self, config: EngineConfig, device: Device, shard: Shard, stage: Stage) -> None:
        super().__init__(config, device, shard, stage)
        # Ranks must sample the same tokens but measure different times: rank 0 enforces the time limit, or, where each
        # rank has a scheduler, none does.
        limits_time = shard.rank == 0 and not config.parallel.plans_on_each_rank
        self.store = GrammarStore(config.structured_outputs.settings, limits_time=limits_time)

    @classmethod
    def is_wanted(cls, config: EngineConfig) -> bool:
        return config.pooling is None

    @property
    def calls(self) -> Mapping[str, Callable[..., Any]]:
        return {"use_vocabulary": self.store.use_vocabulary, "prepare_grammar": self.store.prepare}

    def make_logits_feature(self, batch: InputBatch, vocab_size: int) -> GrammarMask:
        return GrammarMask(batch, vocab_size, self.store)

    def launch_kernels(self) -> None:
        device, vocab_size = self._device.transfers.torch_device, self._config.arch.vocab_size
        logits = torch.zeros(1, vocab_size, device=device)
        words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
        ops.mask_logits(logits, torch.zeros(1, dtype=torch.int64, device=device), words)

    def close(self) -> None:
        self.store.close()


class ConstrainedText:
    """Grammar state of one request's text.

    Args:
        request: with its end ids; with `ignore_eos` it ends only where nothing else is possible.

    Attributes:
        end: column of the row up to which its tokens were read.
        failure: reason why the request cannot continue, if any.
    """

    def __init__(self, request: NewRequestData, grammars: GrammarStore, vocab_size: int) -> None:
        params = request.sampling_params
        assert params.structured_outputs is not None
        self._params: StructuredOutputsParams = params.structured_outputs
        self._grammars = grammars
        self._budget = grammars.budget(self._params, _without_fork(request.request_id))
        self._ignores_ends = params.ignore_eos
        self._end_ids = [token_id for token_id in request.eos_token_ids if token_id < vocab_size]
        self._end_masks = Masks(1, vocab_size)
        self._end_masks.set_only(0, self._end_ids)
        self._has_ended = False
        self._is_shared = True
        self._is_forced_known = True
        self._tokens: list[int] = []
        self.end = request.num_prompt_tokens
        self.failure: str | None = None
        self._matcher: Matcher | None = None
        self._num_steps = 0
        self._free_ns = 0
        self._restart()

    def leave(self) -> None:
        """Remove this text from the request's budget."""
        if self._budget is not None:
            self._budget.remove_text()

    def read(self, token_ids: list[int]) -> None:
        """Advance over generated tokens."""
        with self._metered():
            self._read(token_ids)

    def forced_tokens(self, known: NDArray[np.int32]) -> list[int]:
        """Return one tokenization of what must follow these tokens; nothing if more was read."""
        with self._metered():
            if not self._reads_up_to(known) or self._has_ended or not self._is_forced_known:
                return []
            assert self._matcher is not None
            try:
                return self._matcher.forced_tokens()
            except GrammarError:
                # The forced text exceeds the library's limit; the mask of the next token may still be within limits.
                self._is_forced_known = False
                self._restart()
                return []

    def num_allowed(self, known: NDArray[np.int32], drafts: Sequence[int]) -> int:
        """Return how many drafts may follow these tokens; 0 if more was read."""
        with self._metered():
            if not self._reads_up_to(known):
                return 0
            try:
                with self._behind(drafts) as num_allowed:
                    return num_allowed
            except GrammarError:  # a draft exceeds a limit; the text may not take it
                self._restart()
                return 0

    def fill(self, masks: Masks, place: int, unread: list[int], drafts: Sequence[int] = ()) -> FilledMask:
        """Read tokens, and write the mask of what may follow them and these drafts.

        After a disallowed draft everything is allowed, because no sample there will count. A failure after drafts does
        not fail the request, whose text may differ. The mask of a text that has spent its budget is complete: ranks
        that do not limit time sample the same token with it.
        """
        with self._metered():
            if unread:
                self._read(unread)
            filled = self._filled(masks, place, drafts)
        if filled.failure is None and self._budget is not None and self._budget.is_spent:
            return FilledMask(failure=f"{FAULT}{self._budget.refusal}")
        return filled

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Charge the budget with the CPU time of this thread.

        Compiling is free: whether a grammar must be recompiled depends on what else the store holds.
        """
        self._num_steps = self._free_ns = 0
        started_ns = time.thread_time_ns()
        try:
            yield
        finally:
            if self._budget is not None:
                self._budget.charge(time.thread_time_ns() - started_ns - self._free_ns, self._num_steps)

    def _read(self, token_ids: list[int]) -> None:
        self.end += len(token_ids)
        self._tokens += token_ids
        try:
            self._advance(token_ids)
        except GrammarError as error:
            if not self._leaves_shared_states(error):
                self.failure = f"{FAULT}{error}"

    def _reads_up_to(self, known: NDArray[np.int32]) -> bool:
        """Read a request's tokens; return False if more were read or the text has left its grammar."""
        if self.end > len(known):
            return False
        self._read(known[self.end :].tolist())
        return self.failure is None

    @contextmanager
    def _behind(self, drafts: Sequence[int]) -> Iterator[int]:
        """Advance temporarily over the allowed prefix of some drafts; yield its length."""
        had_ended, num_allowed, num_read = self._has_ended, 0, 0
        for draft in drafts:
            if not self._step(draft):
                break
            num_allowed += 1
            num_read += not self._has_ended
        yield num_allowed
        self._has_ended = had_ended
        if num_read and self._matcher is not None:
            self._matcher.rollback(num_read)

    def _filled(self, masks: Masks, place: int, drafts: Sequence[int]) -> FilledMask:
        """Write a mask; with unshared states if the shared ones are exhausted."""
        if self.failure is not None:
            return FilledMask(failure=self.failure)
        try:
            return FilledMask(self._fill_behind(masks, place, drafts))
        except GrammarError as error:
            masks.words[place] = EVERYTHING
            if self._leaves_shared_states(error):
                return self._filled(masks, place, drafts)
            failure = f"{FAULT}{error}"
            if drafts:
                self._restart()
            else:
                self.failure = failure
            return FilledMask(failure=failure)

    def _leaves_shared_states(self, error: GrammarError) -> bool:
        """Restart without states shared with other texts, if their number may be the cause; return whether it did."""
        if not (error.exhausted and self._is_shared):
            return False
        self._grammars.renew(self._params)
        self._is_shared = False
        self._restart()
        return True

    def _fill_behind(self, masks: Masks, place: int, drafts: Sequence[int]) -> int | None:
        if not drafts:
            return self._fill_here(masks, place)
        with self._behind(drafts) as num_allowed:
            return self._fill_here(masks, place) if num_allowed == len(drafts) else None

    def _fill_here(self, masks: Masks, place: int) -> int | None:
        matcher = self._matcher
        assert matcher is not None
        self._num_steps += 1
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
        """Advance over a token if it is allowed; return whether it is."""
        assert self._matcher is not None
        self._num_steps += 1
        if token_id in self._end_ids:
            self._has_ended = self._has_ended or self._matcher.may_end
            return self._has_ended
        return not self._has_ended and self._matcher.advance(token_id)

    def _restart(self) -> None:
        """Replace the matcher, which is unusable after an error, and advance over the tokens read."""
        self._has_ended = False
        started_ns = time.thread_time_ns()
        try:
            self._matcher = self._grammars.matcher(self._params, shared=self._is_shared)
            self._free_ns += time.thread_time_ns() - started_ns
            self._advance(self._tokens)
        except GrammarError as error:
            self._matcher, self.failure = None, f"{FAULT}{error}"


def _without_fork(request_id: str) -> str:
    """Return the request id without the number of the sequence."""
    label, dash, number = request_id.rpartition("-")
    return f"{label}{dash}{number.partition('.')[0]}"
