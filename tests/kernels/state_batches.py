# SPDX-License-Identifier: Apache-2.0
"""Steps of requests that keep states, for the tests of ops that read and replace them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, count

import torch

from quire.kernels.attention_metadata import StateMetadata

NUM_BLOCKS = 400


def state_batch(
    chunks: Sequence[tuple[int, int]],
    block_size: int,
    is_kept: Callable[[], bool] = lambda: True,
    num_drafts: Sequence[int] | None = None,
) -> StateMetadata:
    """Metadata of requests that compute `length` tokens behind the first `start`: (start, length) of each.

    Where a state must be there is a block, and elsewhere if `is_kept`; all blocks are different. `num_drafts` of each
    come behind its tokens, if there are any, and none has room in its table.
    """
    ids = count(1)
    ends = [start + length for start, length in chunks]
    width = max((-(-end // block_size) for end in ends), default=1)
    tables = torch.zeros(len(chunks), width, dtype=torch.int32)
    for table, (start, length) in zip(tables, chunks, strict=True):
        needed = {(position - 1) // block_size for position in (start, start + length) if position}
        for index in range(-(-(start + length) // block_size)):
            table[index] = next(ids) if index in needed or is_kept() else 0
    drafts = num_drafts or [0] * len(chunks)
    rows = [length + count for (_, length), count in zip(chunks, drafts, strict=True)]
    lengths = [end + count for end, count in zip(ends, drafts, strict=True)]
    return StateMetadata(
        query_start_loc=torch.tensor([0, *accumulate(rows)], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(rows, default=0),
        max_seq_len=max(lengths, default=0),
        block_size=block_size,
        kept_lens=torch.tensor(ends, dtype=torch.int32) if num_drafts else None,
    )
