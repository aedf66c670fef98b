# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass, field

from quire.kv_cache.hashing import BlockHash, ExtraKeys
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from tests.fixtures.folded import folded

BLOCK = 4
PUBLIC = ExtraKeys(cache_salt=None)


@dataclass
class Sequence:
    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    extra_keys: ExtraKeys = PUBLIC


def make_manager(num_blocks: int = 21, num_groups: int = 1, caching: bool = True) -> KVCacheManager:
    spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype_bytes=4)
    groups = tuple(KVCacheGroup((f"layers.{i}",), spec) for i in range(num_groups))
    config = KVCacheConfig(num_blocks, groups, {f"layers.{i}": spec for i in range(num_groups)})
    return KVCacheManager(config, enable_prefix_caching=caching, max_chunk=64)


def compute(manager: KVCacheManager, sequence: Sequence) -> int:
    """Run a whole prompt through the manager; returns the number of tokens found in the cache."""
    hit = manager.get_computed_blocks(sequence)
    assert manager.num_blocks_short(sequence, hit) <= 0
    manager.start(sequence, hit)
    sequence.num_computed_tokens = hit.num_tokens
    assert manager.allocate_slots(sequence, len(sequence.token_ids) - hit.num_tokens) is not None
    sequence.num_computed_tokens = len(sequence.token_ids)
    manager.cache_blocks(sequence, sequence.num_computed_tokens)
    manager.check_integrity()
    return hit.num_tokens


@folded("num_groups", [1, 2])
@folded(("num_tokens", "num_hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_is_of_whole_blocks_and_leaves_a_token_to_compute(num_tokens, num_hit, num_groups):
    manager = make_manager(num_groups=num_groups)
    assert compute(manager, Sequence("a", list(range(num_tokens)))) == 0
    assert compute(manager, Sequence("b", list(range(num_tokens)))) == num_hit


def test_sharing_saves_blocks_but_never_between_groups():
    manager = make_manager(num_groups=2)
    first, second = Sequence("a", list(range(9))), Sequence("b", list(range(9)))
    compute(manager, first)
    compute(manager, second)
    for a, b in zip(manager.get_block_ids(first), manager.get_block_ids(second), strict=True):
        assert a[:2] == b[:2]
        assert a[2] != b[2]
    first_group, second_group = manager.get_block_ids(first)
    assert not set(first_group) & set(second_group)
    assert manager.num_free_blocks == manager.num_usable_blocks - 2 * 4


def test_salts_do_not_see_each_other():
    manager = make_manager()
    salted = [ExtraKeys(cache_salt="x"), ExtraKeys(cache_salt="y"), ExtraKeys(cache_salt=None)]
    for i, keys in enumerate(salted):
        assert compute(manager, Sequence(f"a{i}", list(range(9)), extra_keys=keys)) == 0
    assert compute(manager, Sequence("b", list(range(9)), extra_keys=salted[0])) == 8


def test_nothing_is_found_that_is_not_computed_yet():
    manager = make_manager()
    running = Sequence("a", list(range(9)))
    manager.start(running, manager.get_computed_blocks(running))
    manager.allocate_slots(running, 9)
    assert manager.get_computed_blocks(Sequence("b", list(range(9)))).num_tokens == 0
    manager.cache_blocks(running, 6)
    assert manager.get_computed_blocks(Sequence("b", list(range(9)))).num_tokens == 4


def test_a_hit_on_free_blocks_counts_as_taking_them():
    manager = make_manager(num_blocks=4)
    first = Sequence("a", list(range(9)))
    compute(manager, first)
    manager.free(first)
    other = Sequence("c", [99])
    manager.start(other, manager.no_hit)
    manager.allocate_slots(other, 1)
    again = Sequence("b", list(range(9)))
    hit = manager.get_computed_blocks(again)
    assert hit.num_tokens == 8
    assert manager.num_blocks_short(again, hit) == 1
    manager.free(other)
    assert manager.num_blocks_short(again, hit) == 0


def test_allocation_is_all_or_nothing():
    manager = make_manager(num_blocks=4, num_groups=2)
    sequence = Sequence("a", list(range(5)))
    manager.start(sequence, manager.no_hit)
    assert manager.allocate_slots(sequence, 5) is None
    assert manager.num_free_blocks == 3
    assert manager.allocate_slots(sequence, 4) == manager.get_block_ids(sequence) == [[1], [2]]
    manager.free(sequence)
    assert (manager.num_free_blocks, manager.usage) == (3, 0.0)


def test_statistics_count_tokens_of_started_requests():
    manager = make_manager()
    compute(manager, Sequence("a", list(range(9))))
    manager.get_computed_blocks(Sequence("never started", list(range(9))))
    compute(manager, Sequence("b", list(range(10))))
    assert (manager.prefix_queries, manager.prefix_hits) == (19, 8)


def test_without_prefix_caching_nothing_is_hashed_or_counted():
    manager = make_manager(caching=False)
    for request_id in ("a", "b"):
        sequence = Sequence(request_id, list(range(9)))
        assert compute(manager, sequence) == 0
        assert sequence.block_hashes == []
    assert (manager.prefix_queries, manager.prefix_hits) == (0, 0)


def test_reset_waits_until_nothing_is_held():
    manager = make_manager()
    sequence = Sequence("a", list(range(9)))
    compute(manager, sequence)
    assert not manager.reset_prefix_cache()
    manager.free(sequence)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(Sequence("b", list(range(9)))).num_tokens == 0


def test_the_longest_hit_is_one_that_every_group_has():
    class Group:
        """Stands for a group that can serve only some prefix lengths."""

        def __init__(self, lengths: list[int]) -> None:
            self.lengths = lengths

        def find_longest_cache_hit(self, hashes: object, max_num_tokens: int, find: object) -> list[None]:
            return [None] * (max(n for n in self.lengths if n <= max_num_tokens) // BLOCK)

    manager = make_manager()
    manager.managers = [Group([0, 4, 12, 20]), Group([0, 4, 8, 16])]
    hit = manager.find_longest_cache_hit([], 23, lambda key: None)
    assert hit.num_tokens == 4
    assert [len(blocks) for blocks in hit.blocks] == [1, 1]
