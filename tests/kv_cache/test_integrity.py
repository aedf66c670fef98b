# SPDX-License-Identifier: Apache-2.0
import pytest

from quire.kv_cache.block_pool import DevicePool
from quire.kv_cache.integrity import IntegrityError, check_integrity
from quire.kv_cache.single_type_manager import FullAttentionManager
from quire.kv_cache.spec import FullAttentionSpec


@pytest.fixture
def cache():
    """A pool of 8 blocks, of which `a` and `b` hold two each and share the first."""
    pool = DevicePool(9, num_host_blocks=4)
    manager = FullAttentionManager(FullAttentionSpec(4, 1, 8, 4), pool, group_id=0, max_chunk=16)
    manager.adopt("a", 0, [], [])
    manager.allocate("a", 8)
    manager.cache_blocks("a", [b"x" * 32], 1)
    hit = manager.find_longest_cache_hit([b"x" * 32], 4, pool.get_cached_block)
    manager.adopt("b", 4, hit, *pool.take([hit], num_full=1))
    manager.allocate("b", 8)
    check_integrity(pool, [manager])
    return pool, manager


def lose_a_reference(pool, manager):
    manager.tables["a"][1].ref_cnt = 0


def leak_a_block(pool, manager):
    pool.free_queue.pop_first()


def free_a_held_block(pool, manager):
    pool.free_queue.append(manager.tables["a"][1])


def share_a_partial_block(pool, manager):
    manager.tables["b"][1].ref_cnt = 0
    pool.free_queue.append(manager.tables["b"][1])
    manager.tables["b"][1] = manager.tables["a"][1]
    manager.tables["a"][1].ref_cnt = 2


def share_at_different_positions(pool, manager):
    manager.tables["b"].reverse()


def hold_a_block_twice(pool, manager):
    manager.tables["a"].append(manager.tables["a"][0])
    manager.tables["a"][0].ref_cnt += 1


def forget_a_hash(pool, manager):
    manager.tables["a"][0].block_hash = None


def invent_a_hash(pool, manager):
    manager.tables["a"][1].block_hash = b"y" * 36


def give_out_the_null_block(pool, manager):
    pool.blocks[0].ref_cnt = 1
    manager.tables["a"].append(pool.blocks[0])


def cut_the_free_queue(pool, manager):
    first = next(iter(pool.free_queue))
    first.next_free.prev_free = first.next_free


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_reference,
        leak_a_block,
        free_a_held_block,
        share_a_partial_block,
        share_at_different_positions,
        hold_a_block_twice,
        forget_a_hash,
        invent_a_hash,
        give_out_the_null_block,
        cut_the_free_queue,
    ],
)
def test_damage_is_found_and_the_state_is_shown(cache, damage):
    pool, manager = cache
    damage(pool, manager)
    with pytest.raises(IntegrityError) as caught:
        check_integrity(pool, [manager])
    assert set(caught.value.state) == {"blocks", "free", "cached", "tables"}
    assert "tables" in str(caught.value)
