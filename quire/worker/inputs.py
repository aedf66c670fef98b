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
from quire.kernels.attention_metadata import AttentionMetadata, StepMetadata
from quire.worker.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step with R requests and T tokens; N of the requests sample."""

    rows: NDArray[np.int64]
    """[R] batch row of each request, in the plan's order."""
    starts: NDArray[np.int64]
    """[R] position of each request's first token in this step."""
    query_start_loc: NDArray[np.int64]
    """[R + 1] index of each request's first token in the flat inputs, and T."""
    sampling: NDArray[np.int64]
    """[N] indices, into `rows`, of the requests that sample."""
    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    metadata: StepMetadata

    @property
    def logits_indices(self) -> NDArray[np.int64]:
        """[N] index, in the flat inputs, of the last token of each request that samples."""
        return self.query_start_loc[1:][self.sampling] - 1


def gather_inputs(
    batch: InputBatch, rows: NDArray[np.int64], num_scheduled_tokens: NDArray[np.int64], device: torch.device
) -> StepInputs:
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
    if query_start_loc[-1] == len(rows):
        token_rows, positions = rows, starts  # a token each, as in a step that only decodes
    else:
        token_rows = rows.repeat(num_scheduled_tokens)
        offsets = (starts - query_start_loc[:-1]).repeat(num_scheduled_tokens)
        positions = np.arange(query_start_loc[-1]) + offsets
    return StepInputs(
        rows=rows,
        starts=starts,
        query_start_loc=query_start_loc,
        sampling=(ends == known).nonzero()[0],
        input_ids=_on(device, batch.token_ids[token_rows, positions].astype(np.int64)),
        positions=_on(device, positions),
        metadata=_metadata(batch, rows, query_start_loc, ends, (token_rows, positions), device),
    )


def _metadata(
    batch: InputBatch,
    rows: NDArray[np.int64],
    query_start_loc: NDArray[np.int64],
    ends: NDArray[np.int64],
    tokens: tuple[NDArray[np.int64], NDArray[np.int64]],
    device: torch.device,
) -> StepMetadata:
    """`tokens` are the row and the position of each; `ends` the tokens of each request after the step."""
    starts, seq_lens = _on(device, query_start_loc.astype(np.int32)), _on(device, ends.astype(np.int32))
    max_query_len, longest = int(np.diff(query_start_loc).max()), int(ends.max())
    return tuple(
        AttentionMetadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_tables=_on(device, table.gather(rows, longest)),
            slot_mapping=_on(device, table.slots(*tokens)),
            max_query_len=max_query_len,
            max_seq_len=longest,
        )
        for table in batch.block_tables
    )


def _on(device: torch.device, array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).to(device)


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
