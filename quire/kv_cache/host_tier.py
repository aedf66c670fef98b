"""The host tier: blocks in host memory, for preempted requests and for prefixes the device had to evict.

Invariant: a host block is written by a planned swap-out before anything can refer to it. Blocks of swapped
requests are held until the request returns or ends; all others that hold a prefix may be evicted, least
recently used first. Content is named by its hash as on the device, so a prefix is kept once however many
swapped requests begin with it, and what is here already is not copied again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from quire.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool, KVCacheBlock
from quire.kv_cache.moves import BlockMoves


class SwappedRequest(NamedTuple):
    """The first `num_tokens` tokens of a preempted request; one list of blocks per group, by position.

    The device's null block stands where the request had none.
    """

    num_tokens: int
    tables: tuple[list[KVCacheBlock], ...]


class HostTier:
    """Owns `num_blocks` host blocks, numbered from 1; with none it keeps nothing."""

    def __init__(self, num_blocks: int, moves: BlockMoves) -> None:
        self.pool = BlockPool(num_blocks + 1, on_host=True)
        self._moves = moves
        self._swapped: dict[str, SwappedRequest] = {}

    @property
    def swapped(self) -> Mapping[str, SwappedRequest]:
        """Read-only view: request id -> what is kept of it."""
        return MappingProxyType(self._swapped)

    def offload(self, block: KVCacheBlock) -> None:
        """Keep the content of a device block that is being evicted, unless every host block is held."""
        known = self._find(block)
        if known is not None:
            self.pool.touch([known])
            self.pool.free([known])  # now the most recently used
        elif self.pool.num_free_blocks:
            self.pool.free([self._copy(block)])

    def swap_out(self, request_id: str, tables: Sequence[Sequence[KVCacheBlock]], num_tokens: int) -> bool:
        """Keep all blocks of a request; False, and nothing planned, if the host has no room for them."""
        assert request_id not in self._swapped, f"request {request_id} is swapped out already"
        blocks = [block for table in tables for block in table if block.block_id != NULL_BLOCK_ID]
        known = {block: kept for block in blocks if (kept := self._find(block)) is not None}
        self.pool.touch(known.values())
        if len(blocks) - len(known) > self.pool.num_free_blocks:
            self.pool.free([*known.values()])
            return False
        copies = {block: known.get(block) or self._copy(block) for block in blocks}
        self._swapped[request_id] = SwappedRequest(
            num_tokens, tuple([copies.get(block, block) for block in table] for table in tables)
        )
        return True

    def release(self, request_id: str) -> None:
        """Let go of a swapped request's blocks; one that is not here is fine."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self.pool.free_tables(swapped.tables)

    def _find(self, block: KVCacheBlock) -> KVCacheBlock | None:
        """The host block with the content of a device block, if it is known by its hash."""
        return self.pool.get_cached_block(block.block_hash) if block.block_hash is not None else None

    def _copy(self, block: KVCacheBlock) -> KVCacheBlock:
        """A new host block, held once, into which a device block is copied."""
        (kept,) = self.pool.get_new_blocks(1)
        if block.block_hash is not None:
            self.pool.cache_full_blocks([kept], [block.block_hash])
        self._moves.swap_out(block.block_id, kept.block_id)
        return kept
