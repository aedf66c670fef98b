"""Block tables of one group of layers; one class per kind of KV cache spec.

Invariant: a request's table grows at its end only, and its first `num_cached` blocks have been offered to the
prefix cache. What differs between kinds of attention is which cached blocks make a hit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from quire.kv_cache.block_pool import KVCacheBlock
from quire.kv_cache.device_pool import DevicePool
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


class SingleTypeManager(ABC):
    """Gives the blocks of one group to requests; all groups draw on one pool."""

    def __init__(self, spec: KVCacheSpec, pool: DevicePool, group_id: int) -> None:
        self.block_size = spec.block_size
        self._spec = spec
        self._pool = pool
        self._group_tag = group_id.to_bytes(4, "big")
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}

    @property
    def tables(self) -> Mapping[str, Sequence[KVCacheBlock]]:
        """Read-only view: request id -> its blocks, in order of position."""
        return MappingProxyType(self._tables)

    @abstractmethod
    def find_longest_cache_hit(self, hashes: Sequence[BlockHash], max_num_tokens: int) -> list[KVCacheBlock]:
        """Cached blocks for the longest prefix of at most `max_num_tokens` tokens; nothing is held yet."""

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of this length holds at most."""
        return self._spec.max_blocks(num_tokens)

    def num_blocks_to_start(self, num_tokens: int, hit: Sequence[KVCacheBlock], num_hit_tokens: int) -> int:
        """Free blocks that a request without a table needs for `num_tokens` tokens, given a hit.

        Blocks of the hit that nobody holds are among the free ones, and are taken too.
        """
        num_held = self._pool.num_held(hit, num_hit_tokens // self.block_size)
        return -(-num_tokens // self.block_size) - num_held

    def num_blocks_to_grow(self, request_id: str, num_tokens: int) -> int:
        """Free blocks that a request needs to cover `num_tokens` tokens beyond those it has."""
        return max(-(-num_tokens // self.block_size) - len(self._tables[request_id]), 0)

    def adopt(self, request_id: str, hit: Sequence[KVCacheBlock], table: list[KVCacheBlock]) -> None:
        """Start a request's table with the blocks that a hit became; new ones are not offered yet."""
        assert request_id not in self._tables, f"request {request_id} has blocks already"
        pairs = enumerate(zip(hit, table, strict=True))
        self._num_cached[request_id] = next((i for i, (old, new) in pairs if new is not old), len(hit))
        self._tables[request_id] = table

    def find_fork(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """The blocks in which a running request has its first `num_tokens` tokens, which are computed."""
        return self._tables[request_id][: -(-num_tokens // self.block_size)]

    def allocate(self, request_id: str, num_tokens: int) -> list[int]:
        """Grow the table to cover `num_tokens` tokens; returns the ids of the new blocks."""
        table = self._tables[request_id]
        num_new = -(-num_tokens // self.block_size) - len(table)
        if num_new <= 0:
            return []
        blocks = self._pool.get_new_blocks(num_new)
        table.extend(blocks)
        return [block.block_id for block in blocks]

    def cache_blocks(self, request_id: str, hashes: Sequence[BlockHash], num_full: int) -> None:
        """Offer the first `num_full` blocks, which must be computed, to the prefix cache."""
        start = self._num_cached[request_id]
        if num_full <= start:
            return
        keys = [self._key(block_hash) for block_hash in hashes[start:num_full]]
        self._pool.cache_full_blocks(self._tables[request_id][start:num_full], keys)
        self._num_cached[request_id] = num_full

    def free(self, request_id: str) -> None:
        """Give the request's blocks back; a request without blocks is fine."""
        self._num_cached.pop(request_id, None)
        self._pool.free(self._tables.pop(request_id, []))

    def _key(self, block_hash: BlockHash) -> BlockHash:
        """One pool serves all groups, and each group has its own keys and values for the same tokens."""
        return block_hash + self._group_tag


class FullAttentionManager(SingleTypeManager):
    """Every block is kept until the request ends, so a hit is an unbroken run of blocks from the start."""

    def find_longest_cache_hit(self, hashes: Sequence[BlockHash], max_num_tokens: int) -> list[KVCacheBlock]:
        hit: list[KVCacheBlock] = []
        for block_hash in hashes[: max_num_tokens // self.block_size]:
            block = self._pool.get_cached_block(self._key(block_hash))
            if block is None:
                break
            hit.append(block)
        return hit


MANAGERS: dict[type[KVCacheSpec], type[SingleTypeManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: FullAttentionManager,  # keeps the blocks behind the window: correct, not yet thrifty
}
