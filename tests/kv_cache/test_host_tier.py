# SPDX-License-Identifier: Apache-2.0
import pytest

from quire.kv_cache.block_pool import BlockMoves, HostTier, KVCacheBlock


def block(block_id: int, content: bytes | None = None) -> KVCacheBlock:
    """A device block, findable by its content if it has one."""
    made = KVCacheBlock(block_id)
    made.block_hash = content
    return made


@pytest.fixture
def tier():
    return HostTier(3, BlockMoves())


def contents(tier: HostTier) -> set[bytes]:
    return set(tier.pool.cached_blocks)


def test_evicted_content_is_kept_least_recently_used_goes_first(tier):
    for i, content in enumerate([b"a", b"b", b"c"]):
        tier.offload(block(i + 1, content))
    assert contents(tier) == {b"a", b"b", b"c"}
    tier.offload(block(9, b"a"))
    tier.offload(block(8, b"d"))
    assert contents(tier) == {b"a", b"c", b"d"}


def test_content_that_is_there_is_not_copied_again(tier):
    tier.offload(block(5, b"a"))
    tier.offload(block(6, b"a"))
    assert tier.swap_out("r", [[block(7, b"a"), block(8)]], 6)
    assert [device for device, _ in tier._moves.take().swap_outs] == [5, 8]


def test_later_copy_to_one_host_block_in_a_plan_counts():
    tier = HostTier(1, BlockMoves())
    tier.offload(block(5, b"a"))
    tier.offload(block(6, b"b"))
    assert tier._moves.take().swap_outs == [(6, 1)]
    assert contents(tier) == {b"b"}


def test_swapped_request_is_never_evicted_before_its_release(tier):
    assert tier.swap_out("r", [[block(1, b"a"), block(2)]], 6)
    for i in range(5):
        tier.offload(block(3, bytes([i])))
    assert len(contents(tier)) == 2, "the request's and the last that was evicted"
    assert b"a" in contents(tier)
    tier.release("r")
    tier.release("r")
    assert (tier.pool.num_free_blocks, dict(tier.swapped)) == (3, {})


def test_swapped_requests_share_a_common_prefix(tier):
    assert tier.swap_out("r", [[block(1, b"a"), block(2)]], 6)
    assert tier.swap_out("s", [[block(1, b"a"), block(3)]], 6)
    first, second = (tier.swapped[name].tables[0] for name in "rs")
    assert first[0] is second[0]
    assert first[1] is not second[1]


def test_a_request_that_does_not_fit_leaves_no_trace(tier):
    tier.offload(block(9, b"a"))
    tier._moves.take()
    assert not tier.swap_out("r", [[block(1, b"a"), block(2), block(3), block(4)]], 16)
    assert (tier.pool.num_free_blocks, dict(tier.swapped)) == (3, {})
    assert tier._moves.take().swap_outs == []
    assert contents(tier) == {b"a"}


def test_a_tier_without_blocks_keeps_nothing():
    tier = HostTier(0, BlockMoves())
    tier.offload(block(1, b"a"))
    assert not tier.swap_out("r", [[block(1)]], 1)
    assert contents(tier) == set()
