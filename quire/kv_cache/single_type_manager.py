# SPDX-License-Identifier: Apache-2.0
"""Block tables of one KV cache group; one class per attention type.

Invariant: a running request's table grows at its end only. Its first `num_dropped` entries are the null block, because
no later token reads them, and its first `num_cached` entries have been offered to the prefix cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from quire.kv_cache.block_pool import DevicePool, KVCacheBlock
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.spec import NULL_BLOCK_ID, KVCacheSpec

FindBlock = Callable[[BlockHash], KVCacheBlock | None]
"""Returns the block with a pool key's content, or None."""


class SingleTypeManager(ABC):
    """Block allocation of one group; all groups draw on one pool.

    Args:
        max_chunk: most tokens of a request that one step computes.
    """

    drops_blocks = True  # Blocks may be freed while their request runs.
    leaves_gaps = False  # A table may have null entries behind the dropped ones.

    def __init__(self, spec: KVCacheSpec, pool: DevicePool, group_id: int, max_chunk: int) -> None:
        self.block_size = spec.block_size
        self._spec = spec
        self._pool = pool
        self._null_block = pool.blocks[NULL_BLOCK_ID]
        self._group_tag = group_id.to_bytes(4, "big")
        self._max_chunk = max_chunk
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}
        self._num_dropped: dict[str, int] = {}

    @property
    def tables(self) -> Mapping[str, Sequence[KVCacheBlock]]:
        """Read-only view: request id -> its blocks, in order of position."""
        return MappingProxyType(self._tables)

    @property
    def num_cached(self) -> Mapping[str, int]:
        """Read-only view: request id -> leading entries of its table that were offered to the prefix cache."""
        return MappingProxyType(self._num_cached)

    @property
    def num_dropped(self) -> Mapping[str, int]:
        """Read-only view: request id -> leading entries of its table that were given back."""
        return MappingProxyType(self._num_dropped)

    @abstractmethod
    def find_longest_cache_hit(
        self, hashes: Sequence[BlockHash], max_num_tokens: int, find: FindBlock
    ) -> list[KVCacheBlock]:
        """Return table entries for the longest prefix of at most `max_num_tokens` tokens whose blocks `find` knows.

        Nothing is held yet. Blocks that no later token reads need not be known; the null block stands for them.
        """

    def max_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of this length holds."""
        return self._spec.max_blocks(num_tokens, self._max_chunk)

    def max_blocks_of_beams(self, num_shared: int, num_tokens: int, width: int) -> int:
        """Return the most blocks of `width` sequences that grow token by token behind `num_shared` common blocks."""
        each = self._spec.max_blocks(num_tokens, 1)
        shared = 0 if self.drops_blocks else min(num_shared, each)
        return shared + width * (each - shared)

    def num_blocks_to_start(self, num_tokens: int, hit: Sequence[KVCacheBlock], num_hit_tokens: int) -> int:
        """Return the free blocks that a request without a table needs for `num_tokens` tokens, given a hit.

        Unheld blocks of the hit are among the free ones, and are taken too.
        """
        num_skipped = self._spec.first_block(num_hit_tokens)
        num_held = self._pool.num_held(hit, num_hit_tokens // self.block_size)
        without_dropping = self._spec.num_blocks(num_tokens) - num_skipped - num_held
        return min(without_dropping, self.max_blocks(num_tokens))

    def num_blocks_to_grow(self, request_id: str, num_tokens: int) -> int:
        """Return the free blocks that a request needs to cover `num_tokens` tokens beyond those it has."""
        return self._num_new(len(self._tables[request_id]), self._spec.num_blocks(num_tokens))

    def num_blocks_to_finish(self, request_id: str, num_tokens: int) -> int:
        """Return the most free blocks a request needs to reach `num_tokens` tokens in steps, dropping what it can."""
        return min(self.num_blocks_to_grow(request_id, num_tokens), self.max_blocks(num_tokens))

    def num_held_blocks(self, request_id: str) -> int:
        """Return the number of blocks in a request's table."""
        return sum(block is not self._null_block for block in self._tables[request_id])

    def num_entries(self, request_id: str) -> int:
        """Return the number of entries of the request's table."""
        return len(self._tables[request_id])

    def find_fork(self, request_id: str, num_tokens: int) -> list[KVCacheBlock] | None:
        """Return table entries for the first `num_tokens` computed tokens of a running request.

        None if it has freed blocks that the next token reads.
        """
        start, end = self._spec.first_block(num_tokens), self._spec.num_blocks(num_tokens)
        needed = self._tables[request_id][start:end]
        return None if self._null_block in needed else [self._null_block] * start + needed

    def find_branch(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Return table entries for all `num_tokens` computed tokens of a sequence with no step in flight."""
        start, end = self._spec.first_block(num_tokens), self._spec.num_blocks(num_tokens)
        return [self._null_block] * start + self._tables[request_id][start:end]

    def adopt(
        self, request_id: str, num_hit_tokens: int, hit: Sequence[KVCacheBlock], table: list[KVCacheBlock]
    ) -> None:
        """Start a request's table with the resolved entries of a hit; new blocks are not offered yet."""
        assert request_id not in self._tables, f"request {request_id} has blocks already"
        pairs = enumerate(zip(hit, table, strict=True))
        num_same = next((i for i, (old, new) in pairs if new is not old), len(hit))
        self._num_cached[request_id] = min(num_same, num_hit_tokens // self.block_size)
        self._num_dropped[request_id] = self._spec.first_block(num_hit_tokens)
        self._tables[request_id] = table

    def allocate(self, request_id: str, num_tokens: int) -> list[int]:
        """Grow the table to cover `num_tokens` tokens; returns the ids of the new entries."""
        start, end = len(self._tables[request_id]), self._spec.num_blocks(num_tokens)
        return self._extend(request_id, self._new_blocks(start, end))

    def num_blocks_for_drafts(self, request_id: str, num_tokens: int) -> int:
        """Return the free blocks that `allocate_for_drafts` takes."""
        return max(self._spec.num_blocks(num_tokens) - len(self._tables[request_id]), 0)

    def allocate_for_drafts(self, request_id: str, num_tokens: int) -> list[int]:
        """Grow the table to cover `num_tokens` tokens; every entry gets a block, as any new token may be the last."""
        num_new = self.num_blocks_for_drafts(request_id, num_tokens)
        return self._extend(request_id, self._pool.get_new_blocks(num_new))

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Free the blocks behind the first `num_tokens` tokens, which hold only rejected tokens."""
        table, end = self._tables[request_id], self._spec.num_blocks(num_tokens)
        self._pool.free([block for block in table[end:] if block is not self._null_block])
        del table[end:]

    def drop(self, request_id: str, num_computed_tokens: int, *, cached_only: bool) -> None:
        """Free the blocks that are not read once `num_computed_tokens` tokens are computed.

        `cached_only` spares blocks that were not offered to the prefix cache yet, since they would be lost to it.
        """
        start, end = self._num_dropped[request_id], self._spec.first_block(num_computed_tokens)
        if cached_only:
            end = min(end, self._num_cached[request_id])
        if start >= end:
            return
        table = self._tables[request_id]
        self._pool.free([block for block in table[start:end] if block is not self._null_block])
        table[start:end] = [self._null_block] * (end - start)
        self._num_dropped[request_id] = end

    def cache_blocks(self, request_id: str, hashes: Sequence[BlockHash], num_full: int) -> None:
        """Offer the first `num_full` blocks, which must be computed, to the prefix cache."""
        start = self._num_cached[request_id]
        if num_full <= start:
            return
        pairs = zip(self._tables[request_id][start:num_full], hashes[start:num_full], strict=True)
        present = [(block, self._key(name)) for block, name in pairs if block is not self._null_block]
        self._pool.cache_full_blocks([block for block, _ in present], [key for _, key in present])
        self._num_cached[request_id] = num_full

    def keys(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Return the pool keys of this group's blocks with these hashes; none if it caches nothing."""
        return [self._key(name) for name in hashes]

    def forget_hashes(self, hashes: Sequence[BlockHash]) -> None:
        """Remove content of this group from the prefix cache; unknown hashes are ignored."""
        for key in self.keys(hashes):
            self._pool.forget(key)

    def forget(self, request_id: str) -> list[KVCacheBlock]:
        """Remove a request's table and return it for the caller to free; empty for an unknown request."""
        self._num_cached.pop(request_id, None)
        self._num_dropped.pop(request_id, None)
        return self._tables.pop(request_id, [])

    def _extend(self, request_id: str, blocks: list[KVCacheBlock]) -> list[int]:
        self._tables[request_id].extend(blocks)
        return [block.block_id for block in blocks]

    def _num_new(self, start: int, end: int) -> int:
        """Return the blocks that entries `start` to `end` (exclusive) take."""
        return max(end - start, 0)

    def _new_blocks(self, start: int, end: int) -> list[KVCacheBlock]:
        """Allocate entries `start` to `end` (exclusive)."""
        return self._pool.get_new_blocks(max(end - start, 0))

    def _key(self, block_hash: BlockHash) -> BlockHash:
        """Return the pool key: one pool serves all groups, which hold different content for the same tokens."""
        return block_hash + self._group_tag


class FullAttentionManager(SingleTypeManager):
    """Manager that keeps every block until the request finishes; a hit is an unbroken run of blocks from the start."""

    drops_blocks = False

    def find_longest_cache_hit(
        self, hashes: Sequence[BlockHash], max_num_tokens: int, find: FindBlock
    ) -> list[KVCacheBlock]:
        hit: list[KVCacheBlock] = []
        for block_hash in hashes[: max_num_tokens // self.block_size]:
            block = find(self._key(block_hash))
            if block is None:
                break
            hit.append(block)
        return hit


class LocalAttentionManager(SingleTypeManager):
    """Manager that drops blocks no later token reads; a hit needs only the blocks that the next token reads.

    Any prefix whose last blocks are cached is a hit, and the longest is searched from its end. A missing block rules
    out all prefixes that end behind it and need it, down to the prefix that ends there.
    """

    def find_longest_cache_hit(
        self, hashes: Sequence[BlockHash], max_num_tokens: int, find: FindBlock
    ) -> list[KVCacheBlock]:
        end = min(max_num_tokens // self.block_size, len(hashes))
        found: list[KVCacheBlock] = []  # the blocks before `end`, last first
        while len(found) < end - self._spec.first_block(end * self.block_size):
            index = end - len(found) - 1
            block = find(self._key(hashes[index]))
            if block is None:
                end, found = index, []
            else:
                found.append(block)
        return [self._null_block] * (end - len(found)) + found[::-1]
