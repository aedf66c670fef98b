"""The blocks of the device, with a host tier behind them.

Invariant: what a hit names is there when the next forward pass runs, wherever it is now. A block that is full
and on the device is shared; one on the host is swapped into a new block; one that is only partly filled, so that
its taker is going to write to it, is copied into a new block (copy-on-write).
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_cache.block_pool import BlockPool, KVCacheBlock
from quire.kv_cache.events import KVEventLog
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.host_tier import HostTier
from quire.kv_cache.moves import BlockMoves, PlannedMoves
from quire.kv_cache.spec import NULL_BLOCK_ID


class DevicePool(BlockPool):
    """A pool whose evicted content goes to the host tier, and comes back from there."""

    def __init__(self, num_blocks: int, num_host_blocks: int = 0, events: KVEventLog | None = None) -> None:
        super().__init__(num_blocks, events=events)
        self._moves = BlockMoves()
        self.host = HostTier(num_host_blocks, self._moves, events)

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """The block with this content, on the device if it is there, else on the host, or None."""
        return super().get_cached_block(block_hash) or self.host.pool.get_cached_block(block_hash)

    def nearest(self, block: KVCacheBlock) -> KVCacheBlock:
        """The block with the same content on the device, if there is one, else the block itself."""
        return block if block.block_hash is None else super().get_cached_block(block.block_hash) or block

    def num_held(self, hit: Sequence[KVCacheBlock], num_full: int) -> int:
        """Blocks of a hit, of which the first `num_full` are full, that `take` gets without a free block."""
        return sum(block.ref_cnt > 0 and not block.on_host for block in hit[:num_full])

    def take(self, tables: Sequence[Sequence[KVCacheBlock]], num_full: int) -> list[list[KVCacheBlock]]:
        """Hold the content of a hit, in tables of which the first `num_full` blocks are full.

        Returns device blocks in the same order, and the null block where a table has it. New blocks are given out
        only when all that is to be shared or copied is held, because giving them out evicts.
        """
        entries = [(i, block) for table in tables for i, block in enumerate(table)]
        blocks = [(i, block) for i, block in entries if block.block_id != NULL_BLOCK_ID]
        sources = [block for i, block in blocks if i >= num_full or block.on_host]
        self._share([block for i, block in blocks if i < num_full and not block.on_host])
        for source in sources:
            (self.host.pool if source.on_host else self).pin(source)
        filled = dict(zip(sources, self.get_new_blocks(len(sources)), strict=True))
        for source, target in filled.items():
            plan = self._moves.swap_in if source.on_host else self._moves.copy
            plan(source.block_id, target.block_id)
        return [[filled.get(block, block) for block in table] for table in tables]

    def take_moves(self) -> PlannedMoves:
        """The moves that the plan must make; what they read may be evicted or freed after it."""
        self.unpin()
        self.host.pool.unpin()
        return self._moves.take()

    def forget(self, block_hash: BlockHash) -> None:
        """Let nobody find this content again, on either tier."""
        super().forget(block_hash)
        self.host.pool.forget(block_hash)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content on both tiers; refused (False) while any block is held."""
        if self.is_held or self.host.pool.is_held:
            return False
        return super().reset_prefix_cache() and self.host.pool.reset_prefix_cache()

    def _share(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.touch(blocks)
        for block in blocks:
            block.is_full = True

    def _evict(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self.host.offload(block)
        super()._evict(block)
