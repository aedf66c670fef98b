# SPDX-License-Identifier: Apache-2.0
from quire.kv_cache.block_pool import DevicePool, PlannedMoves


def cached(pool: DevicePool, *hashes: bytes):
    """Free blocks that hold this content."""
    blocks = pool.get_new_blocks(len(hashes))
    pool.cache_full_blocks(blocks, hashes)
    pool.free(blocks)
    return blocks


def test_full_blocks_are_shared_and_a_partial_one_is_copied():
    pool = DevicePool(10)
    held = pool.get_new_blocks(3)
    (table,) = pool.take([held], num_full=2)
    assert table[:2] == held[:2]
    assert [block.ref_cnt for block in held] == [2, 2, 2], "the last is pinned until it was copied"
    assert pool.pop_moves() == PlannedMoves([], [], [(held[2].block_id, table[2].block_id)])
    assert [block.ref_cnt for block in held] == [2, 2, 1]
    assert pool.num_held(held, 2) == 2


def test_copy_of_a_block_copied_in_the_same_plan_is_of_original():
    pool = DevicePool(10)
    held = pool.get_new_blocks(1)
    (first,) = pool.take([held], num_full=0)
    (second,) = pool.take([first], num_full=0)
    copies = [(held[0].block_id, block.block_id) for block in (first[0], second[0])]
    assert pool.pop_moves().block_copies == copies


def test_evicted_block_is_swapped_in():
    pool = DevicePool(4, num_host_blocks=2)
    (first,) = cached(pool, b"a")
    pool.free(pool.get_new_blocks(3))
    found = pool.get_cached_block(b"a")
    assert found is not None
    assert found.on_host
    assert pool.num_held([found], 1) == 0
    ((block,),) = pool.take([[found]], num_full=1)
    assert pool.pop_moves() == PlannedMoves(
        [(first.block_id, found.block_id)], [(found.block_id, block.block_id)], []
    )


def test_the_device_is_preferred_to_the_host():
    pool = DevicePool(4, num_host_blocks=2)
    cached(pool, b"a")
    pool.free(pool.get_new_blocks(3))
    on_host = pool.get_cached_block(b"a")
    assert pool.nearest(on_host) is on_host
    (again,) = cached(pool, b"a")
    assert pool.get_cached_block(b"a") is pool.nearest(on_host) is again


def test_allocation_never_evicts_blocks_of_its_own_hit():
    """Two groups, each with one block on the device, free, and one on the host; four blocks in all."""
    pool = DevicePool(5, num_host_blocks=2)
    cached(pool, b"x", b"y")
    pool.free(pool.get_new_blocks(4))
    cached(pool, b"a", b"b")
    hits = [[pool.get_cached_block(name) for name in names] for names in ((b"a", b"x"), (b"b", b"y"))]
    tables = pool.take(hits, num_full=2)
    assert [table[0].block_hash for table in tables] == [b"a", b"b"]
    moves = pool.pop_moves()
    assert [source for source, _ in moves.swap_ins] == [hit[1].block_id for hit in hits]
    assert not pool.host.pool.is_held


def test_a_host_block_that_a_plan_reads_is_not_reused_in_it():
    pool = DevicePool(2, num_host_blocks=1)
    cached(pool, b"a")
    pool.free(pool.get_new_blocks(1))
    pool.pop_moves()
    cached(pool, b"b")
    pool.take([[pool.get_cached_block(b"a")]], num_full=1)
    moves = pool.pop_moves()
    assert (len(moves.swap_ins), moves.swap_outs) == (1, []), "b had to go, but not over a"
