# SPDX-License-Identifier: Apache-2.0
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv_cache.block_pool import BlockPool, FreeBlockQueue, KVCacheBlock
from quire.kv_cache.spec import NULL_BLOCK_ID
from tests.fixtures.asserts import about_an_assert


def ids(blocks):
    return [block.block_id for block in blocks]


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(["append", "prepend", "remove", "pop"]), st.integers(0, 5))),
    st.integers(0, 6),
)
def test_free_queue_behaves_like_a_deque(operations, num_first):
    blocks = [KVCacheBlock(i) for i in range(6)]
    queue, model = FreeBlockQueue(blocks[:num_first]), deque(range(num_first))
    for operation, i in operations:
        if operation == "pop" and model:
            assert queue.pop_first().block_id == model.popleft()
        elif operation == "remove" and i in model:
            queue.remove(blocks[i])
            model.remove(i)
        elif operation == "append" and i not in model:
            queue.append(blocks[i])
            model.append(i)
        elif operation == "prepend" and i not in model:
            queue.prepend(blocks[i])
            model.appendleft(i)
        assert ids(queue) == list(model)
        assert len(queue) == len(model)


@about_an_assert
def test_free_queue_refuses_double_insertion_and_foreign_removal():
    queue, block = FreeBlockQueue(), KVCacheBlock(1)
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(block)
    queue.append(block)
    with pytest.raises(AssertionError, match="already"):
        queue.append(block)


def test_the_null_block_is_never_given_out():
    pool = BlockPool(5)
    assert NULL_BLOCK_ID not in ids(pool.get_new_blocks(4))
    assert (pool.num_free_blocks, pool.usage) == (0, 1.0)


@about_an_assert
def test_no_more_blocks_are_given_out_than_are_free():
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        BlockPool(2).get_new_blocks(2)


def test_cached_blocks_are_evicted_oldest_and_tail_first():
    pool = BlockPool(7)
    first, second = pool.get_new_blocks(3), pool.get_new_blocks(3)
    pool.cache_full_blocks(first, [name(i) for i in (10, 11, 12)])
    pool.cache_full_blocks(second, [name(i) for i in (20, 21, 22)])
    pool.free(first)
    pool.free(second)
    assert ids(pool.get_new_blocks(6)) == ids([*reversed(first), *reversed(second)])


def test_empty_block_is_allocated_before_any_cached_one():
    pool = BlockPool(3)
    cached, bare = pool.get_new_blocks(2)
    pool.cache_full_blocks([cached], [name(0)])
    pool.free([cached])
    pool.free([bare])
    assert pool.get_new_blocks(1) == [bare]


def test_touch_revives_a_free_cached_block_and_keeps_its_content():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [name(0), name(1)])
    pool.free(blocks)
    hit = pool.get_cached_block(name(0))
    assert hit is blocks[0]
    pool.touch([hit])
    assert ids(pool.get_new_blocks(1)) == ids(blocks[1:])
    assert pool.get_cached_block(name(0)) is hit
    assert pool.get_cached_block(name(1)) is None


def test_a_shared_block_is_free_only_when_its_last_holder_leaves():
    pool = BlockPool(2)
    blocks = pool.get_new_blocks(1)
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.num_free_blocks == 0
    pool.free(blocks)
    assert pool.num_free_blocks == 1


@about_an_assert
def test_free_of_an_unreferenced_block_fails():
    pool = BlockPool(2)
    blocks = pool.get_new_blocks(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_the_first_of_two_equal_blocks_stays_the_cached_one():
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([first], [name(7)])
    pool.cache_full_blocks([second], [name(7)])
    assert pool.get_cached_block(name(7)) is first
    assert second.block_hash is None


def test_reset_is_refused_while_a_block_is_held():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(blocks, [name(1)])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(name(1)) is blocks[0]
    pool.free(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(name(1)) is None
    assert blocks[0].block_hash is None
