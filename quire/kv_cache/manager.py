"""`KVCacheManager`: all that the scheduler sees of the KV cache.

Invariant: a block enters the prefix cache only after the step that filled it has come back, so a hit never
depends on work that is still to be done. Two requests that start in one step therefore compute a common
prefix twice; that is at most one step's work, and it keeps a failed step out of the cache.
"""

from __future__ import annotations

from typing import Protocol

from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.coordinator import KVCacheCoordinator, PrefixHit
from quire.kv_cache.hashing import BlockHash, ExtraKeys, extend_hashes
from quire.kv_cache.integrity import IntegrityError, check_integrity
from quire.kv_cache.spec import KVCacheConfig

__all__ = ["CachedSequence", "IntegrityError", "KVCacheManager", "PrefixHit"]


class CachedSequence(Protocol):
    """What the manager needs to know of a request; it alone extends `block_hashes`."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> list[BlockHash]: ...
    @property
    def extra_keys(self) -> ExtraKeys: ...


class KVCacheManager:
    """Gives blocks to requests and finds prefixes that are computed already.

    `prefix_queries` and `prefix_hits` count tokens: of started requests, and of these the ones found. `max_chunk` is
    the most tokens of a request that one step computes.
    """

    def __init__(self, kv_config: KVCacheConfig, *, enable_prefix_caching: bool, max_chunk: int) -> None:
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(kv_config.num_blocks)
        self._coordinator = KVCacheCoordinator(kv_config.groups, self._pool, max_chunk)
        self._no_block_ids: list[list[int]] = [[] for _ in kv_config.groups]  # in most plans, so made once

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._coordinator.block_size

    @property
    def no_hit(self) -> PrefixHit:
        """The hit of zero tokens."""
        return self._coordinator.no_hit

    @property
    def usage(self) -> float:
        """Share of the blocks that is held, 0 to 1."""
        return self._pool.usage

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold at once."""
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that requests can get now."""
        return self._pool.num_free_blocks

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` cached tokens holds at most."""
        return self._coordinator.max_blocks(num_tokens)

    def get_computed_blocks(self, request: CachedSequence) -> PrefixHit:
        """The longest cached prefix that leaves the last known token, from which to sample, uncomputed."""
        if not self._enable_prefix_caching:
            return self.no_hit
        extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        return self._coordinator.find_longest_cache_hit(request.block_hashes, len(request.token_ids) - 1)

    def num_blocks_short(self, request: CachedSequence, hit: PrefixHit) -> int:
        """How many more blocks must be free for all known tokens of a request without blocks, given a prefix hit.

        It fits now if this is 0 or less.
        """
        needed = self._coordinator.num_blocks_to_start(len(request.token_ids), hit)
        return needed - self._pool.num_free_blocks

    def num_blocks_to_finish(self, request: CachedSequence) -> int:
        """Blocks that a started request needs for all its known tokens beyond those it has."""
        return self._coordinator.num_blocks_to_finish(request.request_id, len(request.token_ids))

    def num_held_blocks(self, request: CachedSequence) -> int:
        """Blocks that a started request holds, alone or with others."""
        return self._coordinator.num_held_blocks(request.request_id)

    def start(self, request: CachedSequence, hit: PrefixHit) -> None:
        """Hold the blocks of a hit (possibly of zero tokens) for a request that has none and is to run."""
        self._coordinator.adopt(request.request_id, hit)
        if self._enable_prefix_caching:
            self.prefix_queries += len(request.token_ids)
            self.prefix_hits += hit.num_tokens

    def allocate_slots(self, request: CachedSequence, num_new_tokens: int) -> list[list[int]] | None:
        """Cover `num_new_tokens` more tokens of a started request; all or nothing.

        Returns the new block ids, one list per group (empty where the last block had room) and not to be changed,
        or None if blocks are short. Blocks that the request reads no more are given back first.
        """
        request_id, num_computed_tokens = request.request_id, request.num_computed_tokens
        num_tokens = num_computed_tokens + num_new_tokens
        if self._coordinator.covers(request_id, num_tokens):
            return self._no_block_ids
        self._coordinator.drop(request_id, num_computed_tokens, cached_only=self._enable_prefix_caching)
        needed = self._coordinator.num_blocks_to_grow(request_id, num_tokens)
        if needed > self._pool.num_free_blocks:  # then also give back what no step has come back with yet
            self._coordinator.drop(request_id, num_computed_tokens, cached_only=False)
        if needed > self._pool.num_free_blocks:
            return None
        return self._coordinator.allocate(request_id, num_tokens)

    def cache_blocks(self, request: CachedSequence, num_computed_tokens: int) -> None:
        """Let others reuse the full blocks of the first `num_computed_tokens` tokens, which are computed."""
        num_full = num_computed_tokens // self._coordinator.block_size
        if not self._enable_prefix_caching or num_full == 0:
            return
        if len(request.block_hashes) < num_full:
            extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        self._coordinator.cache_blocks(request.request_id, request.block_hashes, num_full)

    def free(self, request: CachedSequence) -> None:
        """Give back all blocks of a request; one without blocks is fine."""
        self._coordinator.free(request.request_id)

    def get_block_ids(self, request: CachedSequence) -> list[list[int]]:
        """All block ids of a request, one list per group."""
        return self._coordinator.block_ids(request.request_id)

    def holders(self) -> set[str]:
        """Ids of the requests that hold block tables."""
        return set(self._coordinator.managers[0].tables)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while a request holds blocks."""
        return self._pool.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check every invariant of `quire.kv_cache.integrity`.

        Raises:
            IntegrityError: a bug of ours; holds the state.
        """
        check_integrity(self._pool, self._coordinator.managers)
