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

from quire.config import EngineConfig
from quire.layers.base import activation_dtype
from quire.models.draft_heads.autoregressive import STATES, AutoregressiveHead
from quire.scheduler.output import NewRequestData
from quire.spec_decode.drafter import MODEL_KEYS
from quire.worker.guessing_memory import MOST_KEPT, room_of_states, width_of_states
from quire.worker.guessing_model import GuessingModel, Rows, last_of_each, layout_of
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.kept_states import KeptStates, positions_of


class HeadChain(GuessingModel):
    """See `GuessingModel`; `model` is the head, which has its target."""

    keys: ClassVar[frozenset[str]] = MODEL_KEYS["eagle"]

    def __init__(self, model: AutoregressiveHead, *parts: Any, config: EngineConfig, **limits: Any) -> None:
        super().__init__(model, *parts, config=config, **limits)
        self._head = model
        num_rows, size, dtype = self._batch.max_num_seqs, config.arch.hidden_size, activation_dtype(config)
        room, width = room_of_states(config), width_of_states(config)
        self._kept = KeptStates(num_rows, room, width, dtype, self._transfers)
        self._firsts: Rows = np.zeros(num_rows, dtype=np.int64)
        """Of each row, position of the first state that is kept: behind it the head has met nothing."""
        self._behind = torch.empty(num_rows, size, dtype=dtype, device=self._transfers.torch_device)
        """Of each row that is guessed for, the head's state behind the last token that it met."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """What the cache has of a request, it has for the head, too."""
        self._firsts[row] = request.num_computed_tokens

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        layout = inputs.layout
        rows, starts = layout.rows, layout.starts
        if self._head.draft.reads:
            hidden = hidden[:, self._behind.shape[1] :]
        self._make_room(layout)
        known = np.clip(self._batch.num_tokens[rows] - 1, starts, layout.ends)
        self._meet_prompts(layout, known, hidden)
        self._kept.keep(layout, np.maximum(self._firsts[rows], starts), hidden)

    def _make_room(self, layout: StepLayout) -> None:
        """Compute what is kept of rows that would keep too much: what was sampled behind those states is known."""
        firsts = self._firsts[layout.rows]
        full = (layout.ends - firsts > MOST_KEPT) & (firsts < layout.starts)
        if full.any():
            self._meet_kept(layout.rows[full], layout.starts[full])

    def _meet_prompts(self, layout: StepLayout, known: Rows, states: Tensor) -> None:
        """Compute, of a step's tokens, those up to `known` [R], behind which the next token is known."""
        # What the target has computed again, the head has met.
        firsts = np.maximum(layout.starts, self._firsts[layout.rows])
        which = known > firsts
        if not which.any():
            return
        rows, starts, ends = layout.rows[which], firsts[which], known[which]
        offsets = (layout.query_start_loc[:-1] - layout.starts)[which]
        indices = self._upload(positions_of(starts + offsets, ends - starts))
        self._meet(rows, starts, ends, states.index_select(0, indices))
        self._firsts[rows] = ends

    def _meet_kept(self, rows: Rows, ends: Rows) -> None:
        """Compute what is kept of each row up to `ends` [R], some of all rows at a time if it is much."""
        each = max(self._max_num_tokens // len(rows), 1)
        while len(rows):
            starts = self._firsts[rows]
            stops = np.minimum(ends, starts + each)
            counts = stops - starts
            states = self._kept.at(rows.repeat(counts), positions_of(starts, counts))
            self._behind.index_copy_(0, self._upload(rows), self._meet(rows, starts, stops, states))
            self._firsts[rows] = stops
            rows, ends = rows[stops < ends], ends[stops < ends]

    def _first(self, rows: Rows, ends: Rows) -> Rows:
        """Nothing where steps in flight have had the head meet more than is known."""
        chosen = np.full(len(rows), -1, dtype=np.int64)
        has_states = self._firsts[rows] < ends - 1
        if has_states.any():
            rows, ends = rows[has_states], ends[has_states]
            self._meet_kept(rows, ends - 1)
            chosen[has_states] = self._guessed(self._behind.index_select(0, self._upload(rows)), rows, ends)
        return chosen

    def _next(self, rows: Rows, ends: Rows) -> Rows:
        on_rows, ids = self._upload(rows), self._guessed_ids(rows, ends - 1)
        states = self._behind.index_select(0, on_rows)
        behind = self._forward(rows, ends - 2, ends - 1, states, ids)
        self._behind.index_copy_(0, on_rows, behind)
        return self._guessed(behind, rows, ends)

    def _guessed(self, behind: Tensor, rows: Rows, ends: Rows) -> Rows:
        return self._sampled(self._head.compute_logits, behind, rows, ends)

    def _meet(self, rows: Rows, starts: Rows, ends: Rows, states: Tensor) -> Tensor:
        """`_forward` of known tokens, where `states` [T, W] are the target's."""
        counts = ends - starts
        ids = self._known_ids(rows.repeat(counts), positions_of(starts, counts) + 1)
        return self._forward(rows, starts, ends, self._head.read(states), ids)

    def _forward(self, rows: Rows, starts: Rows, ends: Rows, states: Tensor, ids: Tensor) -> Tensor:
        """At positions `starts` to `ends` [R] of each row, meet the tokens behind them; returns the last states [R, H].

        `states` [T, H] are those before these tokens `ids` [T], and at these positions.
        """
        inputs = self._pipeline.gather(layout_of(rows, starts, ends, self._batch.num_prompt_tokens[rows]))
        step = replace(inputs.step, intermediate={STATES: states})
        return last_of_each(self._pipeline.forward(replace(inputs, input_ids=ids, step=step)), inputs)
