"""What models that guess have in common: token after token for all requests of a step, each behind the one before.

A guess is what the engine's sampler makes of the model's logits: shaped by the request's own parameters, penalties and
grammar, and drawn with the noise of the place at which it would stand. Two models that nearly agree on probabilities
then nearly always draw the same token, at any temperature. (Coupling by common random numbers; see M. Daliri et al.,
"Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024.)

Invariant: guesses are a matter of time and of nothing else. They stand in the host's rows, behind the tokens, and not
in those of a device, where steps in flight may have sampled; a pass over them is told what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.scheduler.output import NewRequestData
from quire.spec_decode.drafter import NO_DRAFT, Draft, Text
from quire.worker.devices import Transfers
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.pipeline import LanguageModel, Pipeline
from quire.worker.sampler import Sampler

Rows = NDArray[np.int64]
Logits = Callable[[Tensor], Tensor]
"""[N, H] -> float32 [N, V], which may be changed."""


class _Going(NamedTuple):
    """Of rows [R] that are guessed for: their tokens, guesses included, and how many may be computed."""

    rows: Rows
    ends: Rows
    limits: Rows

    def only(self, which: NDArray[np.bool_]) -> _Going:
        return _Going(self.rows[which], self.ends[which], self.limits[which])


class GuessingModel:
    """A `Drafter`; what it makes of the tokens so far is its subclasses' affair.

    Args:
        model: loaded, its KV cache bound.
        batch: whose requests sample; guesses are written behind their tokens, where nothing counts.
        pipeline: how steps of the model are run on these rows.
        sampler: that of the model that is guessed for.
        transfers: to the device of both models.
        config: of the model that is guessed for.
        slice_size: rows of logits that exist at once.
    """

    keys: ClassVar[frozenset[str]] = frozenset()
    takes_time: ClassVar[bool] = True

    def __init__(
        self,
        model: LanguageModel,
        batch: InputBatch,
        pipeline: Pipeline,
        sampler: Sampler,
        transfers: Transfers,
        *,
        config: EngineConfig,
        slice_size: int,
    ) -> None:
        self._model = model
        self._batch = batch
        self._pipeline = pipeline
        self._sampler = sampler
        self._transfers = transfers
        self._max_num_tokens = config.scheduler.max_num_batched_tokens
        self._slice_size = slice_size

    def add_request(self, row: int, request: NewRequestData) -> None:
        """A request was given a row."""
        raise NotImplementedError

    def remove_request(self, row: int) -> None:
        """Its blocks are the scheduler's."""

    def forget(self, request_id: str) -> None:
        """As above."""

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        """A step was computed, and nothing is sampled yet; `hidden` are its hidden states [T, H], or more behind them.

        The next step may overwrite both.
        """
        raise NotImplementedError

    def _first(self, rows: Rows, ends: Rows) -> Rows:
        """What follows the `ends` [R] tokens of these rows; negative where that is not to be said."""
        raise NotImplementedError

    def _next(self, rows: Rows, ends: Rows) -> Rows:
        """What follows the `ends` [R] tokens of these rows, of which the last was guessed just now."""
        raise NotImplementedError

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        rows = self._batch.rows([text.request_id for text in texts])
        ends = np.array([len(text.token_ids) for text in texts], dtype=np.int64)
        guesses: dict[int, list[int]] = {row: [] for row in rows.tolist()}
        going = _Going(rows, ends, self._limits(rows))
        going = going.only(going.ends <= going.limits)
        chosen = self._first(going.rows, going.ends) if len(going.rows) else going.ends
        for place in range(1, most + 1):
            going, chosen = going.only(chosen >= 0), chosen[chosen >= 0]
            for row, token_id in zip(going.rows.tolist(), chosen.tolist(), strict=True):
                guesses[row].append(token_id)
            if place < most:
                going, chosen = self._go_on(going, chosen)
        return [Draft(guesses[row]) if guesses[row] else NO_DRAFT for row in rows.tolist()]

    def _go_on(self, going: _Going, chosen: Rows) -> tuple[_Going, Rows]:
        """Take guesses [R] for tokens where there is room; returns who goes on, and what is guessed behind them."""
        has_room = going.ends < going.limits
        (rows, ends, limits), chosen = going.only(has_room), chosen[has_room]
        if len(rows):
            self._batch.token_ids[rows, ends] = chosen
            chosen = self._next(rows, ends + 1)
        return _Going(rows, ends + 1, limits), chosen

    def _limits(self, rows: Rows) -> Rows:
        """[R] tokens that may be computed of each row: there are slots for them, and they are in the context."""
        limits = np.full(len(rows), self._batch.max_model_len, dtype=np.int64)
        for table in self._batch.block_tables:
            limits = np.minimum(limits, table.capacity(rows))
        return limits

    def _sampled(self, compute_logits: Logits, hidden: Tensor, rows: Rows, columns: Rows) -> Rows:
        """What stands at these columns of the rows, [R], by hidden states [R, H] before them."""
        samples, found = Samples(rows, columns), []
        for first in range(0, len(rows), self._slice_size):
            part = slice(first, first + self._slice_size)
            logits = compute_logits(hidden[part]).contiguous()
            found.append(self._sampler.guess(logits, samples.part(part)))
        codes = self._transfers.download(found[0] if len(found) == 1 else torch.cat(found))
        self._transfers.mark().wait()
        chosen: Rows = codes.numpy()
        return chosen

    def _known_ids(self, rows: Rows, positions: Rows) -> Tensor:
        """[N] int64 the tokens at these positions, none of which is a guess; steps in flight may have sampled some."""
        tokens = self._batch.device_tokens
        if tokens is None:
            return self._guessed_ids(rows, positions)
        on_rows, at = self._upload(np.stack((rows, positions)))
        return tokens[on_rows, at].long()

    def _guessed_ids(self, rows: Rows, positions: Rows) -> Tensor:
        """[N] int64 the same as the host has them, which knows what was guessed."""
        return self._upload(self._batch.token_ids[rows, positions].astype(np.int64))

    def _upload(self, numbers: Rows) -> Tensor:
        return self._transfers.upload(torch.from_numpy(numbers))


def layout_of(rows: Rows, starts: Rows, ends: Rows, num_prompt_tokens: Rows) -> StepLayout:
    """The tokens `starts` to `ends` [R] of each row, as a step that samples behind the last of them.

    Those behind prompts come in few sizes, and so are taped.
    """
    num_tokens = ends - starts
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
    num_tokens.cumsum(out=query_start_loc[1:])
    return StepLayout(
        rows,
        starts,
        ends,
        query_start_loc,
        num_samples=np.ones_like(rows),
        sampling=np.arange(len(rows)),
        logits_indices=query_start_loc[1:] - 1,
        pools=np.zeros(len(rows), dtype=np.bool_),
        catches_up=bool((starts + 1 >= num_prompt_tokens).all()),
    )


def last_of_each(hidden: Tensor, inputs: StepInputs) -> Tensor:
    """Of the hidden states [T, H] of such a step, those of the last token of each request, [R, H]."""
    return hidden.index_select(0, inputs.logits_indices)
