"""Steps of requests that keep states, for the tests of ops that read and replace them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, count

import torch

from quire.kernels.attention_metadata import StateMetadata

NUM_BLOCKS = 400


def state_batch(
    chunks: Sequence[tuple[int, int]], block_size: int, is_kept: Callable[[], bool] = lambda: True
) -> StateMetadata:
    """Metadata of requests that compute `length` tokens behind the first `start`: (start, length) of each.

    Where a state must be there is a block, and elsewhere if `is_kept`; all blocks are different.
    """
    ids = count(1)
    ends = [start + length for start, length in chunks]
    width = max((-(-end // block_size) for end in ends), default=1)
    tables = torch.zeros(len(chunks), width, dtype=torch.int32)
    for table, (start, length) in zip(tables, chunks, strict=True):
        needed = {(position - 1) // block_size for position in (start, start + length) if position}
        for index in range(-(-(start + length) // block_size)):
            table[index] = next(ids) if index in needed or is_kept() else 0
    return StateMetadata(
        query_start_loc=torch.tensor([0, *accumulate(length for _, length in chunks)], dtype=torch.int32),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_tables=tables,
        max_query_len=max((length for _, length in chunks), default=0),
        max_seq_len=max(ends, default=0),
        block_size=block_size,
    )
