"""From rows to one step's flat inputs.

Invariant: numpy vector operations only, so the cost does not depend on Python visiting tokens; a plain loop
that does the same is the oracle in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.attention_metadata import AttentionMetadata, GroupMetadata, StateMetadata
from quire.layers.step import StepContext
from quire.worker.block_table import BlockTable
from quire.worker.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which tokens of which rows a step computes: R requests and T tokens; N of the requests sample."""

    rows: NDArray[np.int64]
    """[R] batch row of each request, in the plan's order."""
    starts: NDArray[np.int64]
    """[R] position of each request's first token in this step."""
    ends: NDArray[np.int64]
    """[R] tokens of each request after the step."""
    query_start_loc: NDArray[np.int64]
    """[R + 1] index of each request's first token in the flat inputs, and T."""
    sampling: NDArray[np.int64]
    """[N] indices, into `rows`, of the requests that sample."""

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
        """Whether every request computes one token, as in a step that only decodes."""
        return self.num_tokens == len(self.rows)

    @property
    def is_all_sampled(self) -> bool:
        """Whether every token is the last of a request that samples, as in most steps that only decode."""
        return self.num_tokens == len(self.sampling)

    @property
    def logits_indices(self) -> NDArray[np.int64]:
        """[N] index, in the flat inputs, of the last token of each request that samples."""
        return self.query_start_loc[1:][self.sampling] - 1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step, on the device."""

    layout: StepLayout
    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    logits_indices: Tensor
    """[N] int32 or int64: those of the layout."""
    step: StepContext
    graph_size: int = 0
    """The size of the captured graph for which they were made, with padding behind the R requests; 0: none."""


def lay_out(
    batch: InputBatch, rows: NDArray[np.int64], num_scheduled_tokens: NDArray[np.int64]
) -> StepLayout:
    """Lay the scheduled tokens of some rows side by side.

    Args:
        rows: [R] rows of the step, all different.
        num_scheduled_tokens: [R] tokens to compute for each, counted from its computed tokens.

    Raises:
        EngineError: the plan schedules tokens that a row does not know or has no blocks for.
    """
    starts = batch.num_computed_tokens.take(rows)
    ends = starts + num_scheduled_tokens
    known = batch.num_tokens.take(rows)
    _check_bounds(batch, rows, starts, ends, known)
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
    num_scheduled_tokens.cumsum(out=query_start_loc[1:])
    return StepLayout(rows, starts, ends, query_start_loc, sampling=(ends == known).nonzero()[0])


def gather_inputs(
    batch: InputBatch, rows: NDArray[np.int64], num_scheduled_tokens: NDArray[np.int64]
) -> StepInputs:
    """The inputs of the layout of these rows, gathered by the host; raises as `lay_out` does."""
    layout = lay_out(batch, rows, num_scheduled_tokens)
    if layout.is_one_token_each:
        token_rows, positions = rows, layout.starts
    else:
        token_rows = rows.repeat(num_scheduled_tokens)
        offsets = (layout.starts - layout.query_start_loc[:-1]).repeat(num_scheduled_tokens)
        positions = np.arange(layout.num_tokens) + offsets
    return StepInputs(
        layout=layout,
        input_ids=torch.from_numpy(batch.token_ids[token_rows, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        logits_indices=torch.from_numpy(layout.logits_indices),
        step=StepContext(_metadata(batch, layout, (token_rows, positions))),
    )


def group_metadata(
    table: BlockTable,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    max_query_len: int,
    max_seq_len: int,
) -> GroupMetadata:
    """What the layers of a table's group read: of its kind, and of what is given as much as that kind needs."""
    shared = (query_start_loc, seq_lens, block_tables, max_query_len, max_seq_len)
    return StateMetadata(*shared) if table.has_states else AttentionMetadata(*shared, slots)


def _metadata(
    batch: InputBatch,
    layout: StepLayout,
    tokens: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> tuple[GroupMetadata, ...]:
    """`tokens` are the row and the position of each."""
    starts = torch.from_numpy(layout.query_start_loc.astype(np.int32))
    seq_lens = torch.from_numpy(layout.ends.astype(np.int32))
    max_query_len, longest = layout.max_query_len, layout.max_seq_len
    return tuple(
        group_metadata(
            table,
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_tables=torch.from_numpy(table.gather(layout.rows, longest)),
            slots=torch.from_numpy(table.slots(*tokens)),
            max_query_len=max_query_len,
            max_seq_len=longest,
        )
        for table in batch.block_tables
    )


def _check_bounds(
    batch: InputBatch,
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    known: NDArray[np.int64],
) -> None:
    if not ((starts >= 0) & (starts < ends) & (ends <= known)).all():
        raise EngineError("the plan schedules tokens outside those that a request has")
    for table in batch.block_tables:
        if (ends > table.capacity(rows)).any():
            raise EngineError("the plan schedules tokens for which a request has no cache blocks")
