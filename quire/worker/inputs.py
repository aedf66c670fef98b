# SPDX-License-Identifier: Apache-2.0
"""Flat inputs of one step, gathered from the rows of the batch.

Invariant: numpy vector operations only, so the cost does not depend on Python visiting tokens. A plain loop is the
oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.attention_metadata import AttentionMetadata, GroupMetadata, StateMetadata
from quire.layers.step import StepContext
from quire.scheduler.output import ScheduledRequest
from quire.worker.graphs import GraphShape
from quire.worker.input_batch import BlockTable, InputBatch, Samples
from quire.worker.media_rows import StepMedia


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Tokens of a step: T tokens of R requests, with N samples."""

    rows: NDArray[np.int64]
    """[R] batch row of each request, in the plan's order."""
    starts: NDArray[np.int64]
    """[R] position of each request's first token in this step."""
    ends: NDArray[np.int64]
    """[R] tokens of each request after the step, its drafts included."""
    query_start_loc: NDArray[np.int64]
    """[R + 1] index of each request's first token in the flat inputs, and T."""
    num_samples: NDArray[np.int64]
    """[R] samples of each request: 0, or 1 plus its number of drafts."""
    sampling: NDArray[np.int64]
    """[N] index, into `rows`, of each sample's request."""
    logits_indices: NDArray[np.int64]
    """[N] flat index of the token whose logits give the sample."""
    pools: NDArray[np.bool_]
    """[R] True for a request that is pooled after this step, its last."""
    num_drafts: NDArray[np.int64] | None = None
    """[R] drafts of each request; None: the step has none."""
    catches_up: bool = False
    """True if requests may recompute several generated tokens, but of a prompt at most the last token."""

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start_loc).max())

    @property
    def max_seq_len(self) -> int:
        return int(self.ends.max())

    @property
    def is_one_token_each(self) -> bool:
        """True if every request computes one token, as in a pure decode step."""
        return self.num_tokens == len(self.rows)

    @property
    def is_all_sampled(self) -> bool:
        """True if every token has a sample, as in most pure decode steps."""
        return self.num_tokens == len(self.sampling)

    @property
    def only_generates(self) -> bool:
        """True if no prompt token but perhaps the last is computed: such steps are recorded and cost alike."""
        return self.is_one_token_each or self.is_all_sampled or self.catches_up

    @property
    def samples(self) -> Samples:
        """Rows and columns of all samples."""
        if self.is_all_sampled and self.is_one_token_each:
            return Samples(self.rows, self.ends)
        positions = (self.ends - self.query_start_loc[1:])[self.sampling] + self.logits_indices
        return Samples(self.rows[self.sampling], positions + 1)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one step, on the device."""

    layout: StepLayout
    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: positions by which rows are rotated, those in the cache plus `InputBatch.media`'s deltas."""
    logits_indices: Tensor
    """[N] int32 or int64: those of the layout."""
    step: StepContext
    graph: GraphShape | None = None
    """Shape of the captured graph for these inputs, padded after R requests and T tokens; None: eager."""


def lay_out(batch: InputBatch, scheduled: Sequence[ScheduledRequest]) -> StepLayout:
    """Lay out the tokens of distinct requests, whose drafts are in their rows, side by side.

    Raises:
        EngineError: the plan does not match the rows' tokens, progress or blocks.
    """
    rows = batch.rows([request.request_id for request in scheduled])
    starts = np.array([request.start for request in scheduled], dtype=np.int64)
    num_tokens = np.array([request.num_tokens for request in scheduled], dtype=np.int64)
    num_samples = np.array([request.num_samples for request in scheduled], dtype=np.int64)
    pools = np.array([request.pools for request in scheduled], dtype=np.bool_)
    ends = starts + num_tokens
    has_drafts = any(request.num_samples > 1 for request in scheduled)
    num_drafts = np.maximum(num_samples - 1, 0) if has_drafts else None
    last = ends if num_drafts is None else ends - num_drafts
    _check(batch, scheduled, rows, (starts, last, ends), (num_samples > 0) | pools)
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
    num_tokens.cumsum(out=query_start_loc[1:])
    sampling = np.arange(len(rows)).repeat(num_samples)
    first_to_last = query_start_loc[1:] - num_samples.cumsum()
    logits_indices = np.arange(len(sampling)) + first_to_last[sampling]
    catches_up = not batch.rolls_back and bool((starts + 1 >= batch.num_prompt_tokens[rows]).all())
    return StepLayout(
        rows,
        starts,
        ends,
        query_start_loc,
        num_samples,
        sampling,
        logits_indices,
        pools,
        num_drafts,
        catches_up,
    )


def first_tokens(num_tokens: int) -> StepLayout:
    """Return a layout of the first tokens of row 0; if the row is free, they are tokens 0 in the null block."""
    none = np.zeros(0, dtype=np.int64)
    return StepLayout(
        rows=np.array([0]),
        starts=np.array([0]),
        ends=np.array([num_tokens]),
        query_start_loc=np.array([0, num_tokens]),
        num_samples=np.array([0]),
        sampling=none,
        logits_indices=none,
        pools=np.array([False]),
    )


def gather_inputs(batch: InputBatch, layout: StepLayout) -> StepInputs:
    """Gather the inputs of a layout on the host."""
    token_rows, positions = _places(layout)
    media = gather_media(batch, layout)
    last_seen = None if media is None else media.last_seen
    rotated = positions if batch.media is None else positions + batch.media.deltas[token_rows]
    return StepInputs(
        layout=layout,
        input_ids=torch.from_numpy(batch.token_ids[token_rows, positions].astype(np.int64)),
        positions=torch.from_numpy(rotated),
        logits_indices=torch.from_numpy(layout.logits_indices),
        step=StepContext(
            _metadata(batch, layout, (token_rows, positions), last_seen),
            _adapter_rows(batch, layout),
            token_types=gather_token_types(batch, layout),
            media=None if media is None else media.rows,
            rope_positions=None if media is None else media.rope_positions,
            encoded_lens=None if media is None else media.encoded_lens,
            encoded_rows=None if media is None else media.encoded_rows,
        ),
    )


def gather_media(batch: InputBatch, layout: StepLayout) -> StepMedia | None:
    """Return what media add to a step, on the host; None: nothing."""
    return None if batch.media is None else batch.media.gather(layout)


def _adapter_rows(batch: InputBatch, layout: StepLayout) -> Tensor | None:
    slots = gather_adapter_slots(batch, layout)
    return None if slots is None else torch.from_numpy(slots)


def gather_adapter_slots(batch: InputBatch, layout: StepLayout) -> NDArray[np.int32] | None:
    """Return [T] adapter slots of the tokens, negative for none; None: no token of the step has an adapter."""
    slots = None if batch.adapters is None else batch.adapters.slots_of(layout.rows)
    if slots is None or layout.is_one_token_each:
        return slots
    return slots.repeat(layout.ends - layout.starts)


def has_token_types(batch: InputBatch, layout: StepLayout) -> bool:
    """Return whether a step has tokens of a second text."""
    starts = batch.second_text_starts
    return starts is not None and bool((starts[layout.rows] < layout.ends).any())


def gather_token_types(batch: InputBatch, layout: StepLayout) -> Tensor | None:
    """Return [T] int64 on the host, 1 for tokens of a second text; None: the step has none."""
    starts = batch.second_text_starts
    if starts is None or not has_token_types(batch, layout):
        return None
    token_rows, positions = _places(layout)
    return torch.from_numpy((positions >= starts[token_rows]).astype(np.int64))


def _places(layout: StepLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [T] row and position of each token."""
    if layout.is_one_token_each:
        return layout.rows, layout.starts
    num_tokens = layout.ends - layout.starts
    offsets = (layout.starts - layout.query_start_loc[:-1]).repeat(num_tokens)
    return layout.rows.repeat(num_tokens), np.arange(layout.num_tokens) + offsets


def group_metadata(
    table: BlockTable,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    max_query_len: int,
    max_seq_len: int,
    kept_lens: Tensor | None = None,
    last_seen: Tensor | None = None,
) -> GroupMetadata:
    """Return the metadata of a table's group, as attention or as state layers read it."""
    shared = (query_start_loc, seq_lens, block_tables, max_query_len, max_seq_len)
    if table.has_states:
        return StateMetadata(*shared, table.block_size, kept_lens)
    return AttentionMetadata(*shared, slots, last_seen)


def _metadata(
    batch: InputBatch,
    layout: StepLayout,
    tokens: tuple[NDArray[np.int64], NDArray[np.int64]],
    last_seen: Tensor | None,
) -> tuple[GroupMetadata, ...]:
    """Return the metadata of all groups; `tokens` are the row and position of each token, `last_seen` as in
    `AttentionMetadata`.
    """
    starts = torch.from_numpy(layout.query_start_loc.astype(np.int32))
    seq_lens = torch.from_numpy(layout.ends.astype(np.int32))
    max_query_len, longest = layout.max_query_len, layout.max_seq_len
    kept_lens = None
    if layout.num_drafts is not None:
        kept_lens = torch.from_numpy((layout.ends - layout.num_drafts).astype(np.int32))
    return tuple(
        group_metadata(
            table,
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_tables=torch.from_numpy(table.gather(layout.rows, longest)),
            slots=torch.from_numpy(table.slots(*tokens)),
            max_query_len=max_query_len,
            max_seq_len=longest,
            kept_lens=kept_lens,
            last_seen=last_seen,
        )
        for table in batch.block_tables
    )


def _check(
    batch: InputBatch,
    scheduled: Sequence[ScheduledRequest],
    rows: NDArray[np.int64],
    tokens: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    gives: NDArray[np.bool_],
) -> None:
    """Check the plan against the rows.

    `tokens` [R] each: first computed token, end without drafts, end. `gives` [R]: True if the request is sampled or
    pooled.
    """
    starts, last, ends = tokens
    known, computed = batch.num_tokens.take(rows), batch.num_computed_tokens.take(rows)
    is_good = (starts == computed) & (starts < last) & (last <= known) & ((last == known) == gives)
    _require(is_good, scheduled, "the request's known or computed tokens differ from the plan")
    for table in batch.block_tables:
        _require(
            ends <= table.capacity(rows), scheduled, "the request has no KV cache blocks for these tokens"
        )


def _require(is_good: NDArray[np.bool_], scheduled: Sequence[ScheduledRequest], problem: str) -> None:
    if not is_good.all():
        raise EngineError(f"the plan has {scheduled[int(is_good.argmin())]}, but {problem}")
