# SPDX-License-Identifier: Apache-2.0
"""Host blocks that a store outside the engine fills or reads (`quire.kv_store`).

Invariant: a block is borrowed from the host tier until its bytes have moved, and a load is found by its content only
once they have. Bytes may move when all plans sealed before have run and, for a save, the next one, which copies the
block to the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from quire.kv_cache.block_pool import DevicePool, KVCacheBlock
from quire.kv_cache.hashing import BlockHash


class Transfer(NamedTuple):
    """Content of a pool key, and the host block that its bytes move to or from."""

    key: BlockHash
    block_id: int


class Changes(NamedTuple):
    """Changes of the prefix cache: keys of blocks that became reusable, and of content that proved wrong."""

    cached: list[BlockHash]
    forgotten: list[BlockHash]


class CacheWatch:
    """Changes of the prefix cache for one reader; `pop` must be called after each step."""

    def __init__(self) -> None:
        self._cached: dict[BlockHash, None] = {}
        self._forgotten: list[BlockHash] = []

    def note_cached(self, keys: Sequence[BlockHash]) -> None:
        self._cached.update(dict.fromkeys(keys))

    def forget(self, keys: Sequence[BlockHash]) -> None:
        for key in keys:
            self._cached.pop(key, None)
        self._forgotten += keys

    def pop(self) -> Changes:
        """Return the changes since the last call."""
        changes = Changes(list(self._cached), self._forgotten)
        self._cached, self._forgotten = {}, []
        return changes


class HostTransfers:
    """Loads into, and saves from, blocks of the host tier."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._host = pool.host.pool
        self._loads: dict[int, BlockHash] = {}
        self._watches: list[CacheWatch] = []

    @property
    def loading(self) -> Collection[BlockHash]:
        """Keys whose content is being loaded."""
        return set(self._loads.values())

    @property
    def num_free_blocks(self) -> int:
        """Host blocks that transfers can get now."""
        return self._host.num_free_blocks

    def watch(self) -> CacheWatch:
        """Return the changes of the prefix cache from now on."""
        self._watches.append(CacheWatch())
        return self._watches[-1]

    def note_cached(self, keys: Sequence[BlockHash]) -> None:
        """Note that blocks of a sequence, known or new, have become reusable."""
        for watch in self._watches:
            watch.note_cached(keys)

    def forget(self, keys: Sequence[BlockHash]) -> None:
        """Note that content is wrong; loads of it will not be found."""
        wrong = set(keys)
        self._loads = {block_id: key for block_id, key in self._loads.items() if key not in wrong}
        for watch in self._watches:
            watch.forget(keys)

    def begin_loads(self, keys: Sequence[BlockHash]) -> list[Transfer]:
        """Borrow an empty host block for each key; that many must be free."""
        blocks = self._host.get_new_blocks(len(keys))
        for block, key in zip(blocks, keys, strict=True):
            self._host.borrow(block)
            self._loads[block.block_id] = key
        return [Transfer(key, block.block_id) for key, block in zip(keys, blocks, strict=True)]

    def begin_saves(self, keys: Sequence[BlockHash]) -> list[Transfer]:
        """Borrow a host block with each key's content, copied there by the next plan where it is on the device alone.

        Keys that are no longer cached, that a transfer has already, or for which no host block is free, are left out.
        """
        return list(self._saves(keys))

    def end(self, moved: Sequence[tuple[int, bool]]) -> None:
        """Give back blocks of one sequence, (block id, has moved), in its order; loads that moved can be found."""
        for block_id, has_moved in moved:
            key = self._loads.pop(block_id, None)
            if key is not None and has_moved:
                self._host.cache_full_blocks([self._host.borrowed[block_id]], [key])
        self._host.give_back([block_id for block_id, _ in moved])

    def _saves(self, keys: Collection[BlockHash]) -> Iterator[Transfer]:
        for key in keys:
            block = self._borrow_copy(key)
            if block is not None:
                yield Transfer(key, block.block_id)

    def _borrow_copy(self, key: BlockHash) -> KVCacheBlock | None:
        kept = self._host.get_cached_block(key)
        if kept is not None:
            if kept.block_id in self._host.borrowed:
                return None
            self._host.touch([kept])
        else:
            block = self._pool.get_cached_block(key)
            if block is None or not self._host.num_free_blocks:
                return None
            self._pool.pin(block)
            kept = self._pool.host.copy(block)
        self._host.borrow(kept)
        return kept
