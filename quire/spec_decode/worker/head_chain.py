# SPDX-License-Identifier: Apache-2.0
"""Proposers with draft heads: Medusa, and autoregressive heads (EAGLE, EAGLE-3, MTP)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import activation_dtype
from quire.scheduler.output import NewRequestData
from quire.spec_decode.drafter import MODEL_KEYS
from quire.spec_decode.models.eagle import STATES, AutoregressiveHead, MedusaHeads
from quire.spec_decode.worker.proposer import (
    MOST_KEPT,
    ModelProposer,
    Rows,
    StateRing,
    last_of_each,
    layout_of,
    num_kept_states,
    positions_of,
    state_width,
)
from quire.worker.inputs import StepInputs, StepLayout


class Medusa(ModelProposer):
    """Medusa proposer: head i drafts the token i + 1 positions further on, all from one hidden state.

    It is the state from which the request's last token was sampled, so heads need no pass over tokens and no cache.
    """

    keys: ClassVar[frozenset[str]] = MODEL_KEYS["medusa"]

    def __init__(self, model: MedusaHeads, *parts: Any, config: EngineConfig, **limits: Any) -> None:
        super().__init__(model, *parts, config=config, **limits)
        self._heads = model
        sizes = self._batch.max_num_seqs, num_kept_states(config), state_width(config)
        self._states = StateRing(*sizes, activation_dtype(config), self._transfers)
        self._head = 0
        """Next head to draft with."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Do nothing: states are kept from its first step on."""

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Keep the states from which tokens are sampled."""
        self._states.keep(inputs.layout, inputs.layout.ends - inputs.layout.num_samples, hidden)

    def _first(self, rows: Rows, ends: Rows) -> Rows:
        self._head = 0
        return self._next(rows, ends)

    def _next(self, rows: Rows, ends: Rows) -> Rows:
        head = self._head
        if head == len(self._heads.blocks):
            return np.full(len(rows), -1, dtype=np.int64)
        self._head += 1
        hidden = self._states.at(rows, ends - 2 - head)
        return self._sampled(partial(self._heads.head_logits, head), hidden, rows, ends)

    def _limits(self, rows: Rows) -> Rows:
        """Return no limit but the context: drafts take no slots."""
        return np.full(len(rows), self._batch.max_model_len, dtype=np.int64)


class HeadChain(ModelProposer):
    """Proposer with an autoregressive head, `model`, which shares its target's embedding.

    The head reads each token with the hidden state before it: the target's where the target has computed it, else its
    own. Prompts are computed in the step that computes them. States from which tokens are sampled are kept until
    drafting, when the sampled tokens are known; the first pass then catches up, and each further pass continues from
    its own state.

    Invariant: while drafting is paused, kept states are computed a few at a time. The head's cache entry for the last
    token of a block belongs to the request that filled it; a prefix hit that continues differently is drafted for
    slightly worse.
    """

    keys: ClassVar[frozenset[str]] = MODEL_KEYS["eagle"]

    def __init__(self, model: AutoregressiveHead, *parts: Any, config: EngineConfig, **limits: Any) -> None:
        super().__init__(model, *parts, config=config, **limits)
        self._head = model
        num_rows, size, dtype = self._batch.max_num_seqs, config.arch.hidden_size, activation_dtype(config)
        room, width = num_kept_states(config), state_width(config)
        self._kept = StateRing(num_rows, room, width, dtype, self._transfers)
        self._firsts: Rows = np.zeros(num_rows, dtype=np.int64)
        """[rows] position of the first kept state; the head has computed nothing after it."""
        self._behind = torch.empty(num_rows, size, dtype=dtype, device=self._transfers.torch_device)
        """[rows, H] the head's state after the last token that it computed."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Record what the cache holds of the request, for the head as for the target."""
        self._firsts[row] = request.num_computed_tokens

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        layout = inputs.layout
        rows, starts = layout.rows, layout.starts
        if self._head.draft.reads:
            hidden = hidden[:, self._behind.shape[1] :]
        self._make_room(layout)
        known = np.clip(self._batch.num_tokens[rows] - 1, starts, layout.ends)
        self._compute_prompts(layout, known, hidden)
        self._kept.keep(layout, np.maximum(self._firsts[rows], starts), hidden)

    def _make_room(self, layout: StepLayout) -> None:
        """Compute kept states of rows that would exceed the limit; the tokens sampled from them are known."""
        firsts = self._firsts[layout.rows]
        full = (layout.ends - firsts > MOST_KEPT) & (firsts < layout.starts)
        if full.any():
            self._compute_kept(layout.rows[full], layout.starts[full])

    def _compute_prompts(self, layout: StepLayout, known: Rows, states: Tensor) -> None:
        """Compute the step's tokens up to `known` [R], whose next tokens are known."""
        # Recomputed tokens were computed by the head before.
        firsts = np.maximum(layout.starts, self._firsts[layout.rows])
        which = known > firsts
        if not which.any():
            return
        rows, starts, ends = layout.rows[which], firsts[which], known[which]
        offsets = (layout.query_start_loc[:-1] - layout.starts)[which]
        indices = self._upload(positions_of(starts + offsets, ends - starts))
        self._compute_known(rows, starts, ends, states.index_select(0, indices))
        self._firsts[rows] = ends

    def _compute_kept(self, rows: Rows, ends: Rows) -> None:
        """Compute the kept states of each row up to `ends` [R], in passes of limited size."""
        each = max(self._max_num_tokens // len(rows), 1)
        while len(rows):
            starts = self._firsts[rows]
            stops = np.minimum(ends, starts + each)
            counts = stops - starts
            states = self._kept.at(rows.repeat(counts), positions_of(starts, counts))
            self._behind.index_copy_(0, self._upload(rows), self._compute_known(rows, starts, stops, states))
            self._firsts[rows] = stops
            rows, ends = rows[stops < ends], ends[stops < ends]

    def _first(self, rows: Rows, ends: Rows) -> Rows:
        """Draft the first token; none where in-flight steps have advanced the head beyond what is known."""
        chosen = np.full(len(rows), -1, dtype=np.int64)
        has_states = self._firsts[rows] < ends - 1
        if has_states.any():
            rows, ends = rows[has_states], ends[has_states]
            self._compute_kept(rows, ends - 1)
            chosen[has_states] = self._drafts_from(
                self._behind.index_select(0, self._upload(rows)), rows, ends
            )
        return chosen

    def _next(self, rows: Rows, ends: Rows) -> Rows:
        on_rows, ids = self._upload(rows), self._host_ids(rows, ends - 1)
        states = self._behind.index_select(0, on_rows)
        behind = self._forward(rows, ends - 2, ends - 1, states, ids)
        self._behind.index_copy_(0, on_rows, behind)
        return self._drafts_from(behind, rows, ends)

    def _drafts_from(self, behind: Tensor, rows: Rows, ends: Rows) -> Rows:
        return self._sampled(self._head.compute_logits, behind, rows, ends)

    def _compute_known(self, rows: Rows, starts: Rows, ends: Rows, states: Tensor) -> Tensor:
        """Run `_forward` on known tokens; `states` [T, W] are the target's."""
        counts = ends - starts
        ids = self._known_ids(rows.repeat(counts), positions_of(starts, counts) + 1)
        return self._forward(rows, starts, ends, self._head.read(states), ids)

    def _forward(self, rows: Rows, starts: Rows, ends: Rows, states: Tensor, ids: Tensor) -> Tensor:
        """Compute positions `starts` to `ends` [R] of each row with the tokens after them; return the last states [R,
        H].

        `states` [T, H] are at these positions, `ids` [T] one position further.
        """
        inputs = self._pipeline.gather(layout_of(rows, starts, ends, self._batch.num_prompt_tokens[rows]))
        step = replace(inputs.step, intermediate={STATES: states}, media=None)
        return last_of_each(self._pipeline.forward(replace(inputs, input_ids=ids, step=step)), inputs)
