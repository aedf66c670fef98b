"""A model that guesses what another one says.

Its layers are further layers of the same KV cache: they have the blocks of every request, so prefix hits, forks, swaps
and preemption serve both models, and nothing is kept or sized twice. It computes the prompts of each step with the very
inputs of that step. What is generated it computes when it is asked for guesses, which takes one pass for what it has
not seen and one for each further guess; these stand in slots that the scheduler gives ahead where it has some.

A guess is what the engine's sampler makes of the draft model's logits: shaped by the request's own parameters,
penalties and grammar, and drawn with the noise of the place at which it would stand. Two models that nearly agree on
probabilities then nearly always draw the same token, at any temperature. (Coupling by common random numbers; see
M. Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024.)

Invariant: guesses are a matter of time and of nothing else. In blocks of generated text that nobody asked guesses for,
the draft model's part means nothing, and whoever gets them from the prefix cache is guessed for badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.scheduler.output import NewRequestData
from quire.spec_decode.drafter import MODEL_KEYS, NO_DRAFT, Draft, Text
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.pipeline import LanguageModel, Pipeline
from quire.worker.sampler import Sampler

Rows = NDArray[np.int64]


class _Going(NamedTuple):
    """Of rows [R] that are guessed for: their tokens, guesses that were computed included, and how many may be."""

    rows: Rows
    ends: Rows
    limits: Rows

    def only(self, which: NDArray[np.bool_]) -> _Going:
        return _Going(self.rows[which], self.ends[which], self.limits[which])


class DraftModel:
    """A `Drafter`.

    Args:
        model: loaded, its KV cache bound.
        batch: whose requests sample; guesses are written behind their tokens, where nothing counts.
        pipeline: how steps of the model are run on these rows.
        sampler: that of the model that is guessed for.
        max_num_tokens: of a pass.
        slice_size: rows of logits that exist at once.
    """

    keys: ClassVar[frozenset[str]] = MODEL_KEYS["draft_model"]
    takes_time: ClassVar[bool] = True

    def __init__(
        self,
        model: LanguageModel,
        batch: InputBatch,
        pipeline: Pipeline,
        sampler: Sampler,
        *,
        max_num_tokens: int,
        slice_size: int,
    ) -> None:
        self._model = model
        self._batch = batch
        self._pipeline = pipeline
        self._sampler = sampler
        self._max_num_tokens = max_num_tokens
        self._slice_size = slice_size
        self._num_computed = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self._ahead: list[list[int]] = [[] for _ in range(batch.max_num_seqs)]
        """Of each row, the guesses that were computed behind `_num_computed` tokens."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """What the cache has of a request, it has for both models."""
        self._num_computed[row] = request.num_computed_tokens
        self._ahead[row] = []

    def remove_request(self, row: int) -> None:
        """Its blocks are the scheduler's."""

    def forget(self, request_id: str) -> None:
        """As above."""

    def follow(self, inputs: StepInputs) -> None:
        """Compute what a step computes, unless it only generates."""
        layout = inputs.layout
        if layout.only_generates:
            return
        self._pipeline.forward(inputs)
        num_drafts = 0 if layout.num_drafts is None else layout.num_drafts
        ends = layout.ends - num_drafts
        self._settle(layout.rows, layout.starts)
        is_next = self._num_computed[layout.rows] >= layout.starts
        self._num_computed[layout.rows[is_next]] = ends[is_next]

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        rows = self._batch.rows([text.request_id for text in texts])
        ends = np.array([len(text.token_ids) for text in texts], dtype=np.int64)
        self._settle(rows, ends - 1)
        guesses: dict[int, list[int]] = {row: [] for row in rows.tolist()}
        going = _Going(rows, ends, self._limits(rows))
        going = going.only(going.ends <= going.limits)
        chosen = self._catch_up(going.rows, going.ends)
        for place in range(1, most + 1):
            going, chosen = going.only(chosen >= 0), chosen[chosen >= 0]
            for row, token_id in zip(going.rows.tolist(), chosen.tolist(), strict=True):
                guesses[row].append(token_id)
            if place < most:
                going, chosen = self._go_on(going, chosen)
        return [Draft(guesses[row]) if guesses[row] else NO_DRAFT for row in rows.tolist()]

    def _go_on(self, going: _Going, chosen: Rows) -> tuple[_Going, Rows]:
        """Compute guesses [R] where there are slots for them; returns who goes on, and what is guessed behind them."""
        has_slot = going.ends < going.limits
        (rows, ends, limits), chosen = going.only(has_slot), chosen[has_slot]
        if len(rows):
            self._batch.token_ids[rows, ends] = chosen
            for row, token_id in zip(rows.tolist(), chosen.tolist(), strict=True):
                self._ahead[row].append(token_id)
            chosen = self._sampled(self._forward(rows, ends, ends + 1), rows, ends + 1)
        return _Going(rows, ends + 1, limits), chosen

    def _settle(self, rows: Rows, ends: Rows) -> None:
        """Of what was computed ahead, that counts which the texts agree with; but nothing from `ends` [R] on."""
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            start, ahead = int(self._num_computed[row]), self._ahead[row]
            tokens = self._batch.token_ids[row, start : start + len(ahead)].tolist()
            num_right = next((i for i, guess in enumerate(ahead) if guess != tokens[i]), len(ahead))
            self._num_computed[row] = min(start + num_right, end)
            self._ahead[row] = []

    def _limits(self, rows: Rows) -> Rows:
        """[R] tokens that may be computed of each row: there are slots for them, and they are in the context."""
        limits = np.full(len(rows), self._batch.max_model_len, dtype=np.int64)
        for table in self._batch.block_tables:
            limits = np.minimum(limits, table.capacity(rows))
        return limits

    def _catch_up(self, rows: Rows, ends: Rows) -> Rows:
        """Compute tokens up to `ends` [R], or as many of them as a pass may have.

        Returns what follows [R]; negative where there is more to compute.
        """
        if not len(rows):
            return ends
        starts = self._num_computed[rows]
        stops = np.minimum(ends, starts + max(self._max_num_tokens // len(rows), 1))
        hidden = self._forward(rows, starts, stops)
        self._num_computed[rows] = stops
        chosen = np.full(len(rows), -1, dtype=np.int64)
        done = stops == ends
        if done.any():
            chosen[done] = self._sampled(hidden[torch.from_numpy(done)], rows[done], ends[done])
        return chosen

    def _forward(self, rows: Rows, starts: Rows, ends: Rows) -> Tensor:
        """Compute tokens `starts` to `ends` of each row; hidden states [R, H] behind the last ones."""
        num_tokens = ends - starts
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
        num_tokens.cumsum(out=query_start_loc[1:])
        layout = StepLayout(
            rows,
            starts,
            ends,
            query_start_loc,
            num_samples=num_tokens,  # so short passes are taped, as steps are that verify drafts
            sampling=np.arange(len(rows)).repeat(num_tokens),
            logits_indices=np.arange(num_tokens.sum()),
            pools=np.zeros(len(rows), dtype=np.bool_),
        )
        hidden = self._pipeline.forward(self._pipeline.gather(layout))
        return hidden[torch.from_numpy(query_start_loc[1:] - 1)]

    def _sampled(self, hidden: Tensor, rows: Rows, columns: Rows) -> Rows:
        """What stands at these columns of the rows, [R], by hidden states [R, H] before them."""
        samples, found = Samples(rows, columns), []
        for first in range(0, len(rows), self._slice_size):
            part = slice(first, first + self._slice_size)
            logits = self._model.compute_logits(hidden[part]).contiguous()
            found.append(self._sampler.guess(logits, samples.part(part)))
        return np.concatenate(found)
