# SPDX-License-Identifier: Apache-2.0
"""Tests of where states are read and written, against the documentation of `RecurrentStateSpec`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.reference_scan import leave_state, state_before, state_pieces
from tests.kernels.state_batches import NUM_BLOCKS, state_batch


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4), st.integers(1, 9), st.data())
def test_states_are_where_the_spec_says(
    chunks: list[tuple[int, int]], block_size: int, data: st.DataObject
) -> None:
    """A state that counts tokens: behind the step each entry of a table has the count that it stands for."""
    drafts = [data.draw(st.integers(0, 12)) if length else 0 for _, length in chunks]
    batch = state_batch(chunks, block_size, lambda: data.draw(st.booleans()), drafts)
    counts = torch.full((NUM_BLOCKS,), -1)
    starts = [(table, start) for table, (start, _) in zip(batch.block_tables.tolist(), chunks, strict=True)]
    for table, start in starts:
        if start:
            counts[table[(start - 1) // block_size]] = start
    rows: list[int] = []
    for piece in state_pieces(batch, NUM_BLOCKS):
        rows += range(piece.first, piece.last)
        leave_state(counts, piece, state_before(counts, piece) + piece.last - piece.first)
    assert rows == list(range(sum(length for _, length in chunks) + sum(drafts)))
    assert counts[0] == -1
    for (start, length), table in zip(chunks, batch.block_tables.tolist(), strict=True):
        end = start + length
        for index in range(start // block_size, (end - 1) // block_size + 1) if length else ():
            assert not table[index] or counts[table[index]] == min((index + 1) * block_size, end)


def test_a_state_needs_a_place() -> None:
    bounds, ends = torch.tensor([0, 3]), torch.tensor([5])
    for table in ([0, 1, 2], [1, 2, 0], [1, 2, 9], [-1, 2, 1]):
        metadata = StateMetadata(bounds, ends, torch.tensor([table]), 3, 5, block_size=2)
        with pytest.raises(IndexError, match="no place for a state in a cache of 9 blocks"):
            list(state_pieces(metadata, 9))


def test_drafts_start_from_the_last_state_and_leave_none() -> None:
    batch = state_batch([(3, 4), (0, 1)], 4, num_drafts=[3, 0])
    assert [tuple(piece) for piece in state_pieces(batch, NUM_BLOCKS)] == [
        (0, 1, 1, 1),
        (1, 4, 1, 2),
        (4, 7, 2, 0),
        (7, 8, 0, 3),
    ]
    with pytest.raises(IndexError, match="cannot write a state after 3"):
        list(state_pieces(replace(batch, kept_lens=torch.tensor([3, 1])), NUM_BLOCKS))


def test_padding_of_a_decode_batch_is_in_no_piece() -> None:
    tables = torch.tensor([[3, 4], [0, 0]])
    metadata = StateMetadata(torch.arange(3), torch.tensor([5, 0]), tables, 1, 5, block_size=4)
    assert [tuple(piece) for piece in state_pieces(metadata, 5)] == [(0, 1, 3, 4)]
