# SPDX-License-Identifier: Apache-2.0
"""Draft model: a smaller language model that drafts for the target.

Its layers share the target's KV cache blocks, so prefix hits, forks, swaps and preemption serve both models, and
nothing is kept or sized twice. It computes the prompts of each step with that step's inputs. Generated tokens are
computed when drafts are requested: one pass for those not computed yet and one per further draft token. Drafts use the
lookahead slots that the scheduler allocates.

Invariant: in blocks of generated text for which no drafts were requested, the draft model's part is meaningless; a
prefix hit on them yields poor drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.kv_cache import cache_users
from quire.layers.states import StateCache
from quire.models.base import CausalLM
from quire.scheduler.output import NewRequestData
from quire.spec_decode.drafter import MODEL_KEYS, Draft, Text
from quire.spec_decode.worker.proposer import ModelProposer, Rows, last_of_each, layout_of, without_media
from quire.worker.inputs import StepInputs


class DraftModel(ModelProposer):
    """`ModelProposer` with a separate language model."""

    keys: ClassVar[frozenset[str]] = MODEL_KEYS["draft_model"]

    def __init__(self, model: CausalLM, *parts: Any, config: EngineConfig, **limits: Any) -> None:
        super().__init__(model, *parts, config=config, **limits)
        self._num_rows = model.config.arch.vocab_size
        self._num_tokens = config.arch.vocab_size
        self._has_all = self._num_rows >= self._num_tokens + config.max_added_tokens
        self._num_computed = np.zeros(self._batch.max_num_seqs, dtype=np.int64)
        self._ahead: list[list[int]] = [[] for _ in range(self._batch.max_num_seqs)]
        """[rows] drafts computed after `_num_computed` tokens."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Record what the cache holds of the request, for both models."""
        self._num_computed[row] = request.num_computed_tokens
        self._ahead[row] = []

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Compute the step's tokens, unless it only decodes."""
        layout = inputs.layout
        if layout.only_generates:
            return
        self._pipeline.forward(self._readable(inputs))
        num_drafts = 0 if layout.num_drafts is None else layout.num_drafts
        ends = layout.ends - num_drafts
        self._accept_ahead(layout.rows, layout.starts, is_known=self._pipeline.reads_host_tokens)
        is_next = self._num_computed[layout.rows] >= layout.starts
        self._num_computed[layout.rows[is_next]] = ends[is_next]

    def _first(self, rows: Rows, ends: Rows) -> Rows:
        """Catch up, within the size of one pass; the rest follows with the next request for drafts."""
        self._accept_ahead(rows, ends - 1)
        starts = self._num_computed[rows]
        stops = np.minimum(ends, starts + max(self._max_num_tokens // len(rows), 1))
        hidden = self._forward(rows, starts, stops)
        self._num_computed[rows] = stops
        chosen = np.full(len(rows), -1, dtype=np.int64)
        done = stops == ends
        if done.any():
            which = hidden if done.all() else hidden.index_select(0, self._upload(done.nonzero()[0]))
            chosen[done] = self._sampled(self._logits, which, rows[done], ends[done])
        return chosen

    def _next(self, rows: Rows, ends: Rows) -> Rows:
        drafts = self._batch.token_ids[rows, ends - 1]
        for row, token_id in zip(rows.tolist(), drafts.tolist(), strict=True):
            self._ahead[row].append(token_id)
        hidden = self._forward(rows, ends - 1, ends, self._host_ids(rows, ends - 1))
        return self._sampled(self._logits, hidden, rows, ends)

    def _accept_ahead(self, rows: Rows, ends: Rows, *, is_known: bool = True) -> None:
        """Count the drafts computed ahead that were accepted, but none from `ends` [R] on.

        None counts if the host's rows may still hold drafts in their place.
        """
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            start, ahead = int(self._num_computed[row]), self._ahead[row]
            tokens = self._batch.token_ids[row, start : start + len(ahead)].tolist()
            wrong = (i for i, draft in enumerate(ahead) if draft != tokens[i])
            num_right = next(wrong, len(ahead)) if is_known else 0
            self._num_computed[row] = min(start + num_right, end)
            self._ahead[row] = []

    def _forward(self, rows: Rows, starts: Rows, ends: Rows, ids: Tensor | None = None) -> Tensor:
        """Compute tokens `starts` to `ends` of each row; return hidden states [R, H] of the last ones.

        `ids` [T] replace the rows' tokens, for drafts.
        """
        layout = layout_of(rows, starts, ends, self._batch.num_prompt_tokens[rows])
        inputs = without_media(self._pipeline.gather(layout))
        if ids is not None:
            inputs = replace(inputs, input_ids=ids)
        if not self._has_all:  # in place: a graph reads the ids at their address
            inputs.input_ids.masked_fill_(inputs.input_ids >= self._num_rows, 0)
        return last_of_each(self._pipeline.forward(inputs), inputs)

    def _readable(self, inputs: StepInputs) -> StepInputs:
        """Return the target's inputs, in which tokens without a row in the draft model's table read row 0."""
        ids = inputs.input_ids
        if self._has_all or ids.is_floating_point():
            return inputs
        return replace(inputs, input_ids=ids.masked_fill(ids >= self._num_rows, 0))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V] for the target's tokens, which are never drafted where the draft model has none."""
        logits = self._model.compute_logits(hidden)[:, : self._num_tokens]
        missing = self._num_tokens - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def make_draft_model(model: CausalLM, *parts: Any, **limits: Any) -> ModelProposer:
    """Return the proposer for a draft model; the other arguments are those of `ModelProposer`."""
    has_states = any(isinstance(layer, StateCache) for layer in cache_users(model))
    return (RecurrentDraftModel if has_states else DraftModel)(model, *parts, **limits)


class RecurrentDraftModel(DraftModel):
    """Draft model with layers that keep states (Mamba and the like).

    A state cannot roll back. So states after the last known token are saved when drafting begins and restored when it
    ends; accepted drafts are computed again with what follows.

    The cache keeps a request's states at the target's progress and frees the block of an earlier one. So while drafting
    is paused, the tokens of a block are computed all at once, when its last token is.

    Invariant: between calls the states of a row are those after `_num_computed` of its tokens, and lie in the block of
    the last of these, which the cache has not freed.
    """

    def __init__(self, model: CausalLM, *parts: Any, config: EngineConfig, **limits: Any) -> None:
        super().__init__(model, *parts, config=config, **limits)
        self._states = [layer for layer in cache_users(model) if isinstance(layer, StateCache)]
        self._tables = [table for table in self._batch.block_tables if table.has_states]
        self._aside: list[tuple[Tensor, Tensor, Tensor]] = []
        """While drafting: views of states, blocks of the drafted rows, and the saved states."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        self._num_computed[row] = request.num_computed_tokens

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Compute the step's prompts, and other rows whose state block would be freed before the next step."""
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
        """Draft the first token; none where in-flight steps have advanced the states beyond what is known."""
        chosen = np.full(len(rows), -1, dtype=np.int64)
        which = (self._num_computed[rows] < ends).nonzero()[0]
        for part, hidden in self._catch_up(rows[which], ends[which]):
            these = which[part]
            chosen[these] = self._sampled(self._logits, hidden, rows[these], ends[these])
        return chosen

    def _next(self, rows: Rows, ends: Rows) -> Rows:
        if not self._aside:  # before the first draft token is computed
            self._set_aside(rows, ends - 2)
        hidden = self._forward(rows, ends - 1, ends, self._host_ids(rows, ends - 1))
        return self._sampled(self._logits, hidden, rows, ends)

    def _set_aside(self, rows: Rows, positions: Rows) -> None:
        """Save the states of rows [R] after the last known tokens, at these positions [R]."""
        for layer in self._states:
            table = self._batch.block_tables[layer.group_id]
            blocks = self._upload(table.block_ids[rows, positions // table.block_size].astype(np.int64))
            self._aside += [(view, blocks, view.index_select(0, blocks)) for view in layer.views]

    def _catch_up(self, rows: Rows, ends: Rows) -> Iterator[tuple[slice, Tensor]]:
        """Compute the first `ends` [R] tokens of each row, which are known, in parts of at most one step's tokens.

        Yield the rows of each part and the hidden states [R, H] of their last tokens.
        """
        starts = self._num_computed[rows]
        for part in _parts(ends - starts, self._max_num_tokens):
            hidden = self._forward(rows[part], starts[part], ends[part])
            self._num_computed[rows[part]] = ends[part]
            yield part, hidden

    def _is_left_behind(self, computed: Rows, ends: Rows) -> NDArray[np.bool_]:
        """Return [R] whether the block of the states after `computed` [R] tokens is freed or shared.

        That may happen once `ends` [R] tokens are computed.
        """
        is_behind = np.zeros(len(computed), dtype=np.bool_)
        for table in self._tables:
            is_behind |= np.maximum(computed - 1, 0) // table.block_size < ends // table.block_size
        return is_behind


def _parts(counts: Rows, most: int) -> Iterator[slice]:
    """Yield slices of counts [R] with sums of at most `most`, or of one count."""
    first, total = 0, 0
    for place, count in enumerate(counts.tolist()):
        if total + count > most and place > first:
            yield slice(first, place)
            first, total = place, 0
        total += count
    if first < len(counts):
        yield slice(first, len(counts))
