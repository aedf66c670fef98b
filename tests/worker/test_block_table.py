# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import EngineError
from quire.kv_cache.block_pool import DevicePool
from quire.kv_cache.managers import MANAGERS
from quire.kv_cache.spec import FullAttentionSpec, KVCacheSpec, RecurrentStateSpec, SlidingWindowSpec
from quire.worker.input_batch import BlockTable
from tests.worker.harness import rows_of


def table() -> BlockTable:
    return BlockTable(max_num_rows=3, max_model_len=16, spec=FullAttentionSpec(4, 1, 1, 4), pool_size=20)


def test_positions_map_to_slots() -> None:
    blocks = table()
    blocks.append(1, [7, 3], 0)
    blocks.append(1, [19], 0)
    blocks.append(0, [5], 0)
    rows, positions = rows_of(1, 1, 1, 1, 0), rows_of(0, 3, 4, 11, 2)
    assert blocks.slots(rows, positions).tolist() == [28, 31, 12, 79, 22]
    assert blocks.capacity(rows_of(0, 1, 2)).tolist() == [4, 12, 0]


def test_gather_is_wide_enough_and_a_copy() -> None:
    blocks = table()
    blocks.append(1, [7, 3, 9], 0)
    gathered = blocks.gather(rows_of(1, 0), num_tokens=5)
    assert gathered.shape == (2, 2)
    assert gathered[0].tolist() == [7, 3]
    blocks.clear(1)
    blocks.append(1, [11], 0)
    assert gathered[0].tolist() == [7, 3]


def test_clear_touches_one_row() -> None:
    blocks = table()
    blocks.append(0, [1, 2], 0)
    blocks.append(1, [3], 0)
    blocks.clear(0)
    assert blocks.num_blocks.tolist() == [0, 1, 0]
    blocks.append(0, [4], 0)
    assert blocks.slots(rows_of(0), rows_of(1)).tolist() == [17]


@pytest.mark.parametrize("block_id", [0, -1, 20, 2**31])
def test_block_outside_the_pool_is_refused(block_id: int) -> None:
    blocks = table()
    with pytest.raises(EngineError, match="block ids"):
        blocks.append(0, [1, block_id], 0)
    assert blocks.num_blocks[0] == 0


def test_row_cannot_overflow() -> None:
    blocks = table()
    blocks.append(0, [1, 2, 3], 0)
    with pytest.raises(EngineError, match="5 blocks"):
        blocks.append(0, [4, 5], 0)


def test_the_null_block_may_stand_only_where_nothing_is_read() -> None:
    """With a window of 5 in blocks of 4, the token at position 12 reads back to position 8."""
    spec = SlidingWindowSpec(4, 1, 1, 4, sliding_window=5)
    blocks = BlockTable(max_num_rows=2, max_model_len=24, spec=spec, pool_size=20)
    blocks.append(0, [0, 0, 7, 3], 12)
    assert blocks.capacity(rows_of(0)).tolist() == [16]
    for position in (0, 11):
        with pytest.raises(EngineError, match="0 where the spec needs no block"):
            blocks.append(1, [0, 0, 7], position)
    with pytest.raises(EngineError, match="0 where the spec needs no block"):
        blocks.append(0, [0], 14)


def test_a_block_of_the_pool_may_be_several_to_the_kernels() -> None:
    """Keys and values of 4 tokens are planes; three such blocks fill half a block of the pool."""
    spec = FullAttentionSpec(4, 1, 1, 4).grown(3)
    blocks = BlockTable(max_num_rows=2, max_model_len=30, spec=spec, pool_size=20, parts_per_block=12)
    blocks.append(1, [5], 0)
    blocks.append(1, [2], 12)
    assert blocks.gather(rows_of(1), 24).tolist() == [[60, 62, 64, 24, 26, 28]]
    assert blocks.capacity(rows_of(0, 1)).tolist() == [0, 24]
    assert blocks.slots(rows_of(1, 1, 1), rows_of(0, 7, 13)).tolist() == [240, 251, 97]
    blocks.append(1, [3], 20)
    with pytest.raises(EngineError, match="a row has 4 blocks; the limit is 3"):
        blocks.append(1, [4], 30)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.sampled_from(
        [
            FullAttentionSpec(4, 1, 1, 4),
            SlidingWindowSpec(4, 1, 1, 4, sliding_window=5),
            RecurrentStateSpec(4, state_bytes=64, checkpoint_blocks=2),
            RecurrentStateSpec(4, state_bytes=64, checkpoint_blocks=100),
        ]
    ),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=4),
    st.integers(0, 3),
)
def test_block_table_takes_the_managers_tables(
    spec: KVCacheSpec, chunks: list[tuple[int, int]], num_before: int
) -> None:
    """Chunks with drafts behind them, of which `num_before` are computed when the row is made."""
    manager = MANAGERS[type(spec)](spec, DevicePool(200), 0, 64)
    manager.adopt("a", 0, [], [])
    blocks = BlockTable(max_num_rows=1, max_model_len=200, spec=spec, pool_size=200)
    computed, given_ids = 0, []
    for number, (num_tokens, num_drafts) in enumerate(chunks):
        manager.drop("a", computed, cached_only=False)
        new = manager.allocate("a", computed + num_tokens)
        new += manager.allocate_for_drafts("a", computed + num_tokens + num_drafts)
        if number >= num_before:
            table = [block.block_id for block in manager.tables["a"]]
            blocks.append(0, new if given_ids else table, computed)
            given_ids = table
        computed += num_tokens
    if given_ids:
        assert blocks.capacity(rows_of(0)) >= computed


@pytest.mark.parametrize(
    ("table", "num_computed_tokens"),
    [([0, 1, 0, 2, 0], 0), ([0, 0, 0, 2, 3], 0), ([0, 0, 0, 2], 10)],
    ids=["last", "checkpoint", "read"],
)
def test_a_state_that_is_needed_has_a_block(table: list[int], num_computed_tokens: int) -> None:
    """Every second of blocks of 4 is a checkpoint; behind 10 tokens the state of the third is read."""
    spec = RecurrentStateSpec(4, state_bytes=64, checkpoint_blocks=2)
    blocks = BlockTable(max_num_rows=1, max_model_len=24, spec=spec, pool_size=20)
    blocks.append(0, [0, 1, 0, 2, 3], 0)
    blocks.clear(0)
    with pytest.raises(EngineError, match="0 where the spec needs no block"):
        blocks.append(0, table, num_computed_tokens)
