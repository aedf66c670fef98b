from __future__ import annotations

import pytest

from quire.errors import EngineError
from quire.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from quire.worker.block_table import BlockTable
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
        with pytest.raises(EngineError, match="0 where no block is needed"):
            blocks.append(1, [0, 0, 7], position)
    with pytest.raises(EngineError, match="0 where no block is needed"):
        blocks.append(0, [0], 14)
