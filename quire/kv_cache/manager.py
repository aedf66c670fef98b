"""`KVCacheManager`: all that the scheduler sees of the KV cache.

Invariant: a block enters the prefix cache only after the step that filled it has come back, so a hit never
depends on work that is still to be done. Two requests that start in one step therefore compute a common
prefix twice; that is at most one step's work, and it keeps a failed step out of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.kv_cache.coordinator import KVCacheCoordinator, PrefixHit
from quire.kv_cache.device_pool import DevicePool
from quire.kv_cache.events import KVCacheEvent, KVEventLog
from quire.kv_cache.hashing import BlockHash, ExtraKeys, extend_hashes
from quire.kv_cache.integrity import IntegrityError, check_integrity
from quire.kv_cache.moves import PlannedMoves
from quire.kv_cache.spec import KVCacheConfig, SwapCosts

__all__ = ["CachedSequence", "IntegrityError", "KVCacheManager", "PlannedMoves", "PrefixHit"]


class CachedSequence(Protocol):
    """What the manager needs to know of a request; it alone extends `block_hashes`.

    Others computed the first `num_cached_tokens` tokens, as of when it first started.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> list[BlockHash]: ...
    @property
    def extra_keys(self) -> ExtraKeys: ...


class KVCacheManager:
    """Gives blocks to requests and finds prefixes that are computed already.

    `prefix_queries` and `prefix_hits` count tokens: of requests that were looked up in the prefix cache for their first
    start, and of these the ones found, on either tier. What starts as a fork is looked up nowhere, and a request that
    resumes was counted before. `num_swaps` counts requests that were swapped out. `rolls_back` is the config's.
    `max_chunk` is the most tokens of a request in a step. With `enable_events`, what `take_events` gives must be taken
    now and then.
    """

    def __init__(
        self,
        kv_config: KVCacheConfig,
        *,
        enable_prefix_caching: bool,
        max_chunk: int,
        preemption_mode: str = "auto",
        enable_events: bool = False,
    ) -> None:
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_swaps = 0
        self.rolls_back = kv_config.rolls_back
        self._enable_prefix_caching = enable_prefix_caching
        self._prefers_swap = PREEMPTION_MODES[preemption_mode]
        self._swap_costs = kv_config.swap_costs
        self._block_bytes = sum(kv_config.tensor_block_bytes)
        self._events = KVEventLog(kv_config.block_size) if enable_events else None
        self._pool = DevicePool(kv_config.num_blocks, kv_config.num_host_blocks, self._events)
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
    def host_usage(self) -> float:
        """Share of the host blocks that swapped requests hold, 0 to 1."""
        return self._pool.host.pool.usage

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

    def get_computed_blocks(self, request: CachedSequence, most: int | None = None) -> PrefixHit:
        """Return the longest cached prefix that leaves the last known token, from which to sample, uncomputed.

        Args:
            most: tokens that it may have.
        """
        if not self._enable_prefix_caching:
            return self.no_hit
        extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        limit = len(request.token_ids) - 1
        limit = limit if most is None else min(limit, most)
        return self._coordinator.find_longest_cache_hit(request.block_hashes, limit)

    def get_swapped_blocks(self, request: CachedSequence) -> PrefixHit | None:
        """All that a swapped-out request had computed; None if it is not swapped out.

        What of it is still, or again, on the device is shared there and not copied back.
        """
        swapped = self._pool.host.swapped.get(request.request_id)
        if swapped is None:
            return None
        return PrefixHit(
            swapped.num_tokens, tuple([self._pool.nearest(b) for b in table] for table in swapped.tables)
        )

    def get_forked_blocks(self, parent: CachedSequence, num_tokens: int) -> PrefixHit:
        """The first `num_tokens` tokens of a running request, to start another from that begins with them.

        They must be computed before the plan that starts the other runs. Full blocks are shared, with or
        without prefix caching; a last, partly filled one is copied. Where a group has given back what the other
        would read, or has replaced a state, the hit is of zero tokens.
        """
        return self._coordinator.find_fork(parent.request_id, num_tokens)

    def num_blocks_short(self, request: CachedSequence, hit: PrefixHit) -> int:
        """How many more blocks must be free for all known tokens of a request without blocks, given a hit.

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

    def start(self, request: CachedSequence, hit: PrefixHit, *, is_resumed: bool = False) -> None:
        """Hold the blocks of a hit (possibly of zero tokens) for a request that has none and is to run."""
        self._coordinator.adopt(request.request_id, hit)
        self._pool.host.release(request.request_id)
        if hit.from_cache and not is_resumed:
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

    def allocate_drafts(
        self, request: CachedSequence, num_tokens: int, num_kept_free: int
    ) -> list[list[int]] | None:
        """Cover `num_tokens` tokens, of which the last are drafts, or of further rounds, and all others are covered.

        Returns the new block ids as `allocate_slots` does, or None if less than `num_kept_free` blocks stayed free.
        """
        if self._coordinator.covers(request.request_id, num_tokens):
            return self._no_block_ids
        needed = self._coordinator.num_blocks_for_drafts(request.request_id, num_tokens)
        if needed > self._pool.num_free_blocks - num_kept_free:
            return None
        return self._coordinator.allocate_for_drafts(request.request_id, num_tokens)

    def cache_blocks(self, request: CachedSequence, num_computed_tokens: int) -> None:
        """Let others reuse the full blocks of the first `num_computed_tokens` tokens, which are computed."""
        num_full = num_computed_tokens // self._coordinator.block_size
        if not self._enable_prefix_caching or num_full == 0:
            return
        if len(request.block_hashes) < num_full:
            extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        self._coordinator.cache_blocks(request.request_id, request.block_hashes, num_full)
        if self._events is not None:
            self._events.describe(request)

    def disown(self, request: CachedSequence) -> None:
        """Take what a failed request has computed out of the prefix cache, in this life and those before a preemption.

        It goes by content: a copy on the host, or one that another request has swapped in, may be as bad. A request
        that holds such blocks keeps them, and answers for what it computes from them itself. What the request found
        when it first started was computed by others, and stays.
        """
        first = request.num_cached_tokens // self.block_size
        self._coordinator.forget(request.block_hashes[first:])

    def preempt(self, request: CachedSequence) -> None:
        """Take a started request's device blocks; its content goes to the host if that is worth it."""
        request_id, num_tokens = request.request_id, request.num_computed_tokens
        self._coordinator.drop(request_id, num_tokens, cached_only=False)
        self._coordinator.truncate(request_id, num_tokens)
        num_bytes = self._coordinator.num_held_blocks(request_id) * self._block_bytes
        if self._prefers_swap(self._swap_costs, num_bytes, num_tokens):
            tables = self._coordinator.tables(request_id)
            self.num_swaps += self._pool.host.swap_out(request_id, tables, num_tokens)
        self._coordinator.free(request_id)

    def free(self, request: CachedSequence) -> None:
        """Give back all blocks of a request, on both tiers; one without blocks is fine."""
        self._coordinator.free(request.request_id)
        self._pool.host.release(request.request_id)

    def take_moves(self) -> PlannedMoves:
        """What the plan must copy before its forward pass; to be called once for each plan."""
        return self._pool.take_moves()

    def get_block_ids(self, request: CachedSequence) -> list[list[int]]:
        """All block ids of a request, one list per group."""
        return self._coordinator.block_ids(request.request_id)

    def holders(self) -> set[str]:
        """Ids of the requests that hold block tables."""
        return set(self._coordinator.managers[0].tables)

    def swapped(self) -> set[str]:
        """Ids of the requests that are swapped out."""
        return set(self._pool.host.swapped)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes on both tiers; False, and nothing done, while a request holds blocks."""
        return self._pool.reset_prefix_cache()

    def take_events(self) -> list[KVCacheEvent]:
        """What happened to the prefix cache since the last call, in order; nothing without `enable_events`."""
        return [] if self._events is None else self._events.take()

    def check_integrity(self) -> None:
        """Check every invariant of `quire.kv_cache.integrity`.

        Raises:
            IntegrityError: a bug of ours; holds the state.
        """
        check_integrity(self._pool, self._coordinator.managers)


def is_swap_faster(costs: SwapCosts, num_bytes: int, num_tokens: int) -> bool:
    """Whether copying `num_bytes` out and in again takes less time than computing `num_tokens` again.

    That the prefix cache may still have some of them is left out: what it has when the request returns is not
    copied either.
    """
    return 2 * num_bytes / costs.copied_bytes_per_s < num_tokens / costs.computed_tokens_per_s


def _always(costs: SwapCosts, num_bytes: int, num_tokens: int) -> bool:
    return True


def _never(costs: SwapCosts, num_bytes: int, num_tokens: int) -> bool:
    return False


PREEMPTION_MODES: dict[str, Callable[[SwapCosts, int, int], bool]] = {
    "auto": is_swap_faster,
    "swap": _always,
    "recompute": _never,
}
"""`--preemption-mode` -> whether to swap, if the host has room."""
