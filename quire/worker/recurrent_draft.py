"""A model with layers that keep states (Mamba and the like) guesses what another one says.

A state has no way back, and what guesses replaces it token by token. So states behind the last known token are set
aside when guessing begins and put back when it ends, and what was guessed is computed again once it is known, with what
follows.

The cache keeps a request's states by how far the model has got that is guessed for, and gives back the block of an
earlier one. So while nobody asks for guesses, the tokens of a block are computed all at once, when the last of them is.

Invariant: between calls the states of a row are those behind `_num_computed` of its tokens, and lie in the block of the
last of these, which the cache has not given back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.kv_cache import cache_users
from quire.layers.states import StateCache
from quire.models.base import CausalLM
from quire.scheduler.output import NewRequestData
from quire.spec_decode.drafter import Draft, Text
from quire.worker.draft_model import DraftModel
from quire.worker.guessing_model import GuessingModel, Rows
from quire.worker.inputs import StepInputs


def make_draft_model(model: CausalLM, *parts: Any, **limits: Any) -> GuessingModel:
    """What guesses by a model, which see; the other arguments are those of `GuessingModel`."""
    has_states = any(isinstance(layer, StateCache) for layer in cache_users(model))
    return (RecurrentDraftModel if has_states else DraftModel)(model, *parts, **limits)


class RecurrentDraftModel(DraftModel):
    """See `GuessingModel`; `model` has layers that keep states."""

    def __init__(self, model: CausalLM, *parts: Any, config: EngineConfig, **limits: Any) -> None:
        super().__init__(model, *parts, config=config, **limits)
        self._states = [layer for layer in cache_users(model) if isinstance(layer, StateCache)]
        self._tables = [table for table in self._batch.block_tables if table.has_states]
        self._aside: list[tuple[Tensor, Tensor, Tensor]] = []
        """While it guesses: views of states, the blocks of rows that are guessed for, and what stood there."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        self._num_computed[row] = request.num_computed_tokens

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Compute the prompts of a step, and of other rows what would be too late with the next one."""
        layout = inputs.layout
        rows, ends = layout.rows, layout.ends
        if layout.num_drafts is not None:
            ends = ends - layout.num_drafts
        computed = self._num_computed[rows]
        is_prompt = layout.starts + 1 < self._batch.num_prompt_tokens[rows]
        due = (computed < ends) & (is_prompt | self._is_left_behind(computed, ends))
        for _ in self._catch_up(rows[due], ends[due]):
            pass

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        drafts = super().propose(texts, most)
        for view, blocks, states in self._aside:
            view.index_copy_(0, blocks, states)
        self._aside = []
        return drafts

    def _first(self, rows: Rows, ends: Rows) -> Rows:
        """Nothing where steps in flight have had it compute all that is known."""
        chosen = np.full(len(rows), -1, dtype=np.int64)
        which = (self._num_computed[rows] < ends).nonzero()[0]
        for part, hidden in self._catch_up(rows[which], ends[which]):
            these = which[part]
            chosen[these] = self._sampled(self._logits, hidden, rows[these], ends[these])
        return chosen

    def _next(self, rows: Rows, ends: Rows) -> Rows:
        if not self._aside:  # the first guess behind what is known is to be computed
            self._set_aside(rows, ends - 2)
        hidden = self._forward(rows, ends - 1, ends, self._guessed_ids(rows, ends - 1))
        return self._sampled(self._logits, hidden, rows, ends)

    def _set_aside(self, rows: Rows, positions: Rows) -> None:
        """The states of rows [R] behind the tokens at these positions [R], the last that are known."""
        for layer in self._states:
            table = self._batch.block_tables[layer.group_id]
            blocks = self._upload(table.block_ids[rows, positions // table.block_size].astype(np.int64))
            self._aside += [(view, blocks, view.index_select(0, blocks)) for view in layer.views]

    def _catch_up(self, rows: Rows, ends: Rows) -> Iterator[tuple[slice, Tensor]]:
        """Compute the first `ends` [R] tokens of each row, which are known, as many rows at a time as a step may have
        tokens; gives which they are, and the hidden states [R, H] behind their last tokens.
        """
        starts = self._num_computed[rows]
        for part in _parts(ends - starts, self._max_num_tokens):
            hidden = self._forward(rows[part], starts[part], ends[part])
            self._num_computed[rows[part]] = ends[part]
            yield part, hidden

    def _is_left_behind(self, computed: Rows, ends: Rows) -> NDArray[np.bool_]:
        """[R] whether the cache may give back the states behind `computed` [R] tokens once `ends` [R] are computed, or
        give others the block that is full then.
        """
        is_behind = np.zeros(len(computed), dtype=np.bool_)
        for table in self._tables:
            is_behind |= np.maximum(computed - 1, 0) // table.block_size < ends // table.block_size
        return is_behind


def _parts(counts: Rows, most: int) -> Iterator[slice]:
    """Cut numbers [R] into runs whose sums are at most so much, or that are of one."""
    first, total = 0, 0
    for place, count in enumerate(counts.tolist()):
        if total + count > most and place > first:
            yield slice(first, place)
            first, total = place, 0
        total += count
    if first < len(counts):
        yield slice(first, len(counts))
