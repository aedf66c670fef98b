"""Makes the groups of a model act as one: a prefix hit must hold in all of them, an allocation covers all.

Invariant: all groups cover the same tokens of a request at all times, so their tables have equally many entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.kv_cache.block_pool import KVCacheBlock
from quire.kv_cache.device_pool import DevicePool
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.single_type_manager import MANAGERS
from quire.kv_cache.spec import KVCacheGroup


class PrefixHit(NamedTuple):
    """The first `num_tokens` tokens of a request are in these blocks (one list per group), on either tier.

    A list has an entry for each block of the prefix; the null block stands where a group needs none. All blocks are
    full, unless the hit is of a request that was swapped out or forked. `from_cache` says that it is the prefix cache's
    answer, be it of zero tokens.
    """

    num_tokens: int
    blocks: tuple[list[KVCacheBlock], ...]
    from_cache: bool = False


class KVCacheCoordinator:
    """One manager per group, in the order of the groups; `max_chunk` is the most tokens of a request in a step."""

    def __init__(self, groups: Sequence[KVCacheGroup], pool: DevicePool, max_chunk: int) -> None:
        self._pool = pool
        self.managers = [
            MANAGERS[type(group.spec)](group.spec, pool, i, max_chunk) for i, group in enumerate(groups)
        ]
        self._dropping = [manager for manager in self.managers if manager.drops_blocks]
        self.block_size = self.managers[0].block_size
        assert all(m.block_size == self.block_size for m in self.managers), "groups differ in block size"
        self.no_hit = PrefixHit(0, tuple([] for _ in self.managers))

    def find_longest_cache_hit(self, hashes: Sequence[BlockHash], max_num_tokens: int) -> PrefixHit:
        """The longest prefix that every group has cached.

        Each group in turn shortens the candidate to what it can serve, until a whole round agrees; one group
        that needs less of the prefix than another (a sliding window) may have to be asked again.
        """
        num_tokens, agreed = max_num_tokens // self.block_size * self.block_size, -1
        blocks: tuple[list[KVCacheBlock], ...] = ()
        while num_tokens != agreed:
            agreed, blocks = num_tokens, ()
            for manager in self.managers:
                hit = manager.find_longest_cache_hit(hashes, num_tokens)
                num_tokens = len(hit) * self.block_size
                blocks += (hit,)
        return PrefixHit(num_tokens, blocks, from_cache=True)

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks over all groups that a sequence of this length holds at most."""
        return sum(manager.max_blocks(num_tokens) for manager in self.managers)

    def num_blocks_to_start(self, num_tokens: int, hit: PrefixHit) -> int:
        """Free blocks over all groups that a new request needs for `num_tokens` tokens, given a hit."""
        pairs = zip(self.managers, hit.blocks, strict=True)
        return sum(
            manager.num_blocks_to_start(num_tokens, blocks, hit.num_tokens) for manager, blocks in pairs
        )

    def covers(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request's tables reach over `num_tokens` tokens already."""
        return self.managers[0].num_entries(request_id) * self.block_size >= num_tokens

    def num_blocks_to_grow(self, request_id: str, num_tokens: int) -> int:
        """Free blocks over all groups that a request needs to cover `num_tokens` tokens."""
        return sum([manager.num_blocks_to_grow(request_id, num_tokens) for manager in self.managers])

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks in the request's tables."""
        return sum([manager.num_held_blocks(request_id) for manager in self.managers])

    def num_blocks_to_finish(self, request_id: str, num_tokens: int) -> int:
        """As `num_blocks_to_grow`, but in steps, between which blocks are dropped."""
        return sum([manager.num_blocks_to_finish(request_id, num_tokens) for manager in self.managers])

    def adopt(self, request_id: str, hit: PrefixHit) -> None:
        """Start a request's tables with a hit (possibly an empty one)."""
        tables = self._pool.take(hit.blocks, hit.num_tokens // self.block_size)
        for manager, blocks, table in zip(self.managers, hit.blocks, tables, strict=True):
            manager.adopt(request_id, hit.num_tokens, blocks, table)

    def find_fork(self, request_id: str, num_tokens: int) -> PrefixHit:
        """The first `num_tokens` tokens of a running request, which are computed, as a hit for another.

        Of zero tokens if one group cannot serve them any more.
        """
        tables = [manager.find_fork(request_id, num_tokens) for manager in self.managers]
        found = tuple([table for table in tables if table is not None])
        return PrefixHit(num_tokens, found) if len(found) == len(tables) else self.no_hit

    def tables(self, request_id: str) -> list[Sequence[KVCacheBlock]]:
        """The blocks of a started request, one table per group."""
        return [manager.tables[request_id] for manager in self.managers]

    def allocate(self, request_id: str, num_tokens: int) -> list[list[int]]:
        """Grow the tables to cover `num_tokens` tokens; returns the new block ids per group."""
        return [manager.allocate(request_id, num_tokens) for manager in self.managers]

    def num_blocks_for_drafts(self, request_id: str, num_tokens: int) -> int:
        """Free blocks that `allocate_for_drafts` takes."""
        return sum([manager.num_blocks_for_drafts(request_id, num_tokens) for manager in self.managers])

    def allocate_for_drafts(self, request_id: str, num_tokens: int) -> list[list[int]]:
        """As `allocate`, where the new tokens are drafts; see `SingleTypeManager.allocate_for_drafts`."""
        return [manager.allocate_for_drafts(request_id, num_tokens) for manager in self.managers]

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Give back blocks behind the first `num_tokens` tokens, which were for drafts."""
        for manager in self.managers:
            manager.truncate(request_id, num_tokens)

    def drop(self, request_id: str, num_computed_tokens: int, *, cached_only: bool) -> None:
        """Give back blocks that are not read any more; see `SingleTypeManager.drop`."""
        for manager in self._dropping:
            manager.drop(request_id, num_computed_tokens, cached_only=cached_only)

    def cache_blocks(self, request_id: str, hashes: Sequence[BlockHash], num_full: int) -> None:
        """Offer the first `num_full` blocks of every group to the prefix cache."""
        for manager in self.managers:
            manager.cache_blocks(request_id, hashes, num_full)

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        """Take content out of the prefix cache, in all groups and on both tiers."""
        for manager in self.managers:
            manager.forget_hashes(hashes)

    def free(self, request_id: str) -> None:
        """Give back the request's blocks in all groups."""
        self._pool.free_tables([manager.forget(request_id) for manager in self.managers])

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The request's block ids per group, in order of position."""
        return [[block.block_id for block in m.tables.get(request_id, ())] for m in self.managers]
