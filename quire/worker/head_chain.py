"""Guesses by heads that go on in hidden states (EAGLE and what came of it; MTP).

A head meets each token together with the state before it: the target's where the target has computed it, else its own.
Those of prompts it computes with the step that computes them. States behind which something is sampled are kept until
it is asked for guesses, which shows what was sampled; then the first pass computes what was not computed, and each
further one goes on from the state that came out.

Invariant: while nobody asks, kept states are computed a few at a time. What the head has in the cache for the last
token of a block is of the request that filled it; whoever goes on otherwise from there is guessed for a bit worse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.models.draft_heads.autoregressive import STATES, AutoregressiveHead
from quire.scheduler.output import NewRequestData
from quire.spec_decode.drafter import MODEL_KEYS
from quire.worker.guessing_model import GuessingModel, Rows, last_of_each, layout_of
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.kept_states import KeptStates, positions_of

MOST_KEPT = 32
"""States of a row that are kept, if a step does not bring more."""


class HeadChain(GuessingModel):
    """See `GuessingModel`; `model` is the head, which has its target."""

    keys: ClassVar[frozenset[str]] = MODEL_KEYS["eagle"]

    def __init__(self, model: AutoregressiveHead, *parts: Any, **limits: Any) -> None:
        super().__init__(model, *parts, **limits)
        self._head = model
        num_rows, size = self._batch.max_num_seqs, model.config.arch.hidden_size
        self._kept = KeptStates(num_rows)
        self._behind = torch.empty(num_rows, size)
        """Of each row that is guessed for, the head's state behind the last token that it met."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """What the cache has of a request, it has for the head, too."""
        self._kept.firsts[row] = request.num_computed_tokens

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        layout, kept = inputs.layout, self._kept
        rows, starts = layout.rows, layout.starts
        if self._head.draft.reads:
            hidden = hidden[:, self._behind.shape[1] :]
        self._make_room(layout)
        known = np.clip(self._batch.num_tokens[rows] - 1, starts, layout.ends)
        self._meet_prompts(layout, known, hidden)
        kept.keep(layout, np.maximum(kept.firsts[rows], starts), hidden)

    def _make_room(self, layout: StepLayout) -> None:
        """Compute what is kept of rows that would keep too much: what was sampled behind those states is known."""
        firsts = self._kept.firsts[layout.rows]
        full = (layout.ends - firsts > MOST_KEPT) & (firsts < layout.starts)
        if full.any():
            self._meet_kept(layout.rows[full], layout.starts[full])

    def _meet_prompts(self, layout: StepLayout, known: Rows, states: Tensor) -> None:
        """Compute, of a step's tokens, those up to `known` [R], behind which the next token is known."""
        # What the target has computed again, the head has met.
        firsts = np.maximum(layout.starts, self._kept.firsts[layout.rows])
        which = known > firsts
        if not which.any():
            return
        rows, starts, ends = layout.rows[which], firsts[which], known[which]
        offsets = (layout.query_start_loc[:-1] - layout.starts)[which]
        indices = positions_of(starts + offsets, ends - starts)
        self._forward(rows, starts, ends, self._head.read(states[torch.from_numpy(indices)]))
        self._kept.firsts[rows] = ends

    def _meet_kept(self, rows: Rows, ends: Rows) -> Tensor:
        """Compute what is kept of each row up to `ends` [R]; the states [R, H] that come out last."""
        starts = self._kept.firsts[rows]
        counts = ends - starts
        states = self._kept.at(rows.repeat(counts), positions_of(starts, counts))
        behind = self._forward(rows, starts, ends, self._head.read(states))
        self._kept.firsts[rows] = ends
        return behind

    def _first(self, rows: Rows, ends: Rows) -> Rows:
        return self._guessed(self._meet_kept(rows, ends - 1), rows, ends)

    def _next(self, rows: Rows, ends: Rows) -> Rows:
        states = self._behind[torch.from_numpy(rows)]
        return self._guessed(self._forward(rows, ends - 2, ends - 1, states), rows, ends)

    def _guessed(self, behind: Tensor, rows: Rows, ends: Rows) -> Rows:
        self._behind[torch.from_numpy(rows)] = behind
        return self._sampled(self._head.compute_logits, behind, rows, ends)

    def _forward(self, rows: Rows, starts: Rows, ends: Rows, states: Tensor) -> Tensor:
        """At positions `starts` to `ends` [R] of each row, meet the tokens behind them; returns the last states [R, H].

        `states` [T, H] are those before these tokens, and at these positions.
        """
        layout = layout_of(rows, starts, ends, self._batch.num_prompt_tokens[rows])
        inputs, counts = self._pipeline.gather(layout), ends - starts
        ids = self._batch.token_ids[rows.repeat(counts), positions_of(starts, counts) + 1].astype(np.int64)
        step = replace(inputs.step, intermediate={STATES: states})
        hidden = self._pipeline.forward(replace(inputs, input_ids=torch.from_numpy(ids), step=step))
        return last_of_each(hidden, layout)
