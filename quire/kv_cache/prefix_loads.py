# SPDX-License-Identifier: Apache-2.0
"""Prefixes that a store outside the engine can extend: their keys, and the host blocks that loads borrow."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from quire.kv_cache.block_pool import KVCacheBlock
from quire.kv_cache.hashing import BlockHash, extend_hashes
from quire.kv_cache.manager import CachedSequence, KVCacheManager, PrefixHit, is_storable
from quire.kv_cache.transfers import Transfer


class PrefixLoad(NamedTuple):
    """Cached prefix of `start` tokens that will have `end` tokens once transfers have ended.

    `transfers` are to be made for it, in the order of the sequence; `shared` are keys that others' transfers load.
    """

    start: int
    end: int
    transfers: list[Transfer]
    shared: list[BlockHash]


_ABSENT = -1


def _absent(key: BlockHash) -> KVCacheBlock:
    """Return a stand-in for a block whose content is not here yet."""
    block = KVCacheBlock(_ABSENT, on_host=True)
    block.block_hash = key
    return block


def _missing(hit: PrefixHit) -> list[BlockHash]:
    """Return the keys of the stand-ins in a hit, in the order of the sequence."""
    entries = [block for entries in zip(*hit.blocks, strict=True) for block in entries]
    return [
        block.block_hash for block in entries if block.block_id == _ABSENT and block.block_hash is not None
    ]


def storable_keys(kv: KVCacheManager, request: CachedSequence) -> list[BlockHash]:
    """Return the pool keys, in the order of the sequence, of all full blocks that a request's prefix may need."""
    if not kv.enable_prefix_caching or not is_storable(request):
        return []
    extend_hashes(request.block_hashes, request.token_ids, kv.block_size, request.extra_keys)
    return kv.keys(request.block_hashes[: (len(request.token_ids) - 1) // kv.block_size])


def begin_load(kv: KVCacheManager, request: CachedSequence, stored: Collection[BlockHash]) -> PrefixLoad:
    """Borrow host blocks for what a store can add to a request's cached prefix, as far as they are free."""
    hit, most = kv.get_computed_blocks(request), len(request.token_ids) - 1
    kept = [block for table in hit.blocks for block in table if block.on_host]
    room = kv.transfers.num_free_blocks - sum(block.ref_cnt == 0 for block in kept)
    loading = kv.transfers.loading
    known = {*stored, *loading}
    while True:
        longer = _hit_with(kv, request, known, most)
        if longer.num_tokens <= hit.num_tokens:
            return PrefixLoad(hit.num_tokens, hit.num_tokens, [], [])
        keys = [key for key in _missing(longer) if key not in loading]
        if len(keys) <= room:
            break
        most = longer.num_tokens - max((len(keys) - room) // len(hit.blocks), 1) * kv.block_size
    kv.pool.host.pool.refresh(kept)
    shared = [key for key in _missing(longer) if key in loading]
    return PrefixLoad(hit.num_tokens, longer.num_tokens, kv.transfers.begin_loads(keys), shared)


def _hit_with(
    kv: KVCacheManager, request: CachedSequence, known: Collection[BlockHash], most: int
) -> PrefixHit:
    """Return the longest prefix if the content of `known` keys were cached, too; see `_missing`."""

    def find(key: BlockHash) -> KVCacheBlock | None:
        return kv.pool.get_cached_block(key) or (_absent(key) if key in known else None)

    return kv.find_longest_cache_hit(request.block_hashes, most, find)
