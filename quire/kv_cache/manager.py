# SPDX-License-Identifier: Apache-2.0
"""KV cache manager: the scheduler's interface to the KV cache.

Invariant: a block enters the prefix cache only after the step that filled it has come back, so a hit never depends on
unfinished work. Two requests that start in one step therefore compute a common prefix twice; that is at most one
step's work, and it keeps a failed step out of the cache.

The groups of a model act as one: a prefix hit must hold in all of them, an allocation covers all. Invariant: all groups
cover the same tokens of a request, so their tables have equally many entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from quire.adapters import outlives_engine
from quire.kv_cache.block_pool import DevicePool, KVCacheBlock, PlannedMoves
from quire.kv_cache.events import KVCacheEvent, KVEventLog
from quire.kv_cache.hashing import BlockHash, ExtraKeys, extend_hashes
from quire.kv_cache.integrity import IntegrityError, check_integrity
from quire.kv_cache.managers import MANAGERS
from quire.kv_cache.single_type_manager import FindBlock, SingleTypeManager
from quire.kv_cache.spec import KVCacheConfig, SwapCosts
from quire.kv_cache.transfers import HostTransfers

__all__ = ["CachedSequence", "IntegrityError", "KVCacheManager", "PlannedMoves", "PrefixHit"]


class PrefixHit(NamedTuple):
    """First `num_tokens` tokens of a request in these blocks (one list per group), on either tier.

    A list has an entry for each block of the prefix; the null block stands where a group needs none. All blocks are
    full, unless the hit is of a swapped or forked request. `from_cache`: found by a prefix cache lookup, even if of
    zero tokens. `is_mixed`: other weights computed some of them (`KVCacheManager.mix`).
    """

    num_tokens: int
    blocks: tuple[list[KVCacheBlock], ...]
    from_cache: bool = False
    is_mixed: bool = False


def is_storable(request: CachedSequence) -> bool:
    """Return whether a request's blocks may outlive the process: an adapter must be named by its content."""
    adapter = request.extra_keys.adapter
    return adapter is None or outlives_engine(adapter)


class CachedSequence(Protocol):
    """Fields of a request that the manager reads; only the manager extends `block_hashes`.

    The first `num_cached_tokens` tokens were computed by others, as of its first start.
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
    """Allocator of blocks to requests, with prefix lookup.

    `prefix_queries` and `prefix_hits` count tokens: of requests looked up in the prefix cache for their first start,
    and the found ones on either tier. Forks are not looked up, and resumed requests were counted before. `num_swaps`
    counts requests that were swapped out. `rolls_back` is the config's. `max_chunk` is the most tokens of a request in
    a step. With `enable_events`, `pop_events` must be called now and then; `events` is for
    `quire.scheduler.store_access`.

    Attributes:
        managers: manager of each group, in group order, for readers.
        no_hit: hit of zero tokens.
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
        self.enable_prefix_caching = enable_prefix_caching
        self._prefers_swap = PREEMPTION_MODES[preemption_mode]
        self._swap_costs = kv_config.swap_costs
        self._block_bytes = sum(kv_config.tensor_block_bytes)
        self.events = KVEventLog(kv_config.block_size) if enable_events else None
        self._pool = DevicePool(kv_config.num_blocks, kv_config.num_host_blocks, self.events)
        self.transfers = HostTransfers(self._pool)
        self.managers: Sequence[SingleTypeManager] = [
            MANAGERS[type(group.spec)](group.spec, self._pool, i, max_chunk)
            for i, group in enumerate(kv_config.groups)
        ]
        self._dropping = [manager for manager in self.managers if manager.drops_blocks]
        self.block_size = self.managers[0].block_size
        assert all(m.block_size == self.block_size for m in self.managers), "groups differ in block size"
        self.no_hit = PrefixHit(0, tuple([] for _ in self.managers))
        self._mixed: set[str] = set()  # ids of requests with blocks that other weights have computed
        # Returned by most plans, so shared.
        self._no_block_ids: list[list[int]] = [[] for _ in kv_config.groups]

    @property
    def pool(self) -> DevicePool:
        """Pool of all blocks, for readers; only the managers change it."""
        return self._pool

    @property
    def tokens_per_key(self) -> float:
        """Tokens of a full block, over the groups that cache it."""
        return self.block_size / max(len(self.keys([b""])), 1)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that is held, 0 to 1."""
        return self._pool.usage

    @property
    def host_usage(self) -> float:
        """Fraction of the host blocks that swapped requests hold, 0 to 1."""
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
        """Return the most blocks that a sequence of `num_tokens` cached tokens holds."""
        return sum(manager.max_blocks(num_tokens) for manager in self.managers)

    def max_blocks_of_beams(self, num_prompt_tokens: int, num_tokens: int, width: int) -> int:
        """Return the most blocks that `width` sequences of `num_tokens` tokens hold, which share full prompt blocks."""
        num_full = num_prompt_tokens // self.block_size
        return sum(manager.max_blocks_of_beams(num_full, num_tokens, width) for manager in self.managers)

    def get_computed_blocks(self, request: CachedSequence, most: int | None = None) -> PrefixHit:
        """Return the longest cached prefix that leaves the last known token, from which to sample, uncomputed.

        Args:
            most: limit in tokens.
        """
        if not self.enable_prefix_caching:
            return self.no_hit
        extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        limit = len(request.token_ids) - 1
        limit = limit if most is None else min(limit, most)
        return self.find_longest_cache_hit(request.block_hashes, limit, self._pool.get_cached_block)

    def find_longest_cache_hit(
        self, hashes: Sequence[BlockHash], max_num_tokens: int, find: FindBlock
    ) -> PrefixHit:
        """Return the longest prefix of which `find` knows what every group needs.

        Each group in turn shortens the candidate to what it can serve, until a whole pass agrees; a group that needs
        less of the prefix than another (a sliding window) may have to be queried again.
        """
        num_tokens, agreed = max_num_tokens // self.block_size * self.block_size, -1
        blocks: tuple[list[KVCacheBlock], ...] = ()
        while num_tokens != agreed:
            agreed, blocks = num_tokens, ()
            for manager in self.managers:
                hit = manager.find_longest_cache_hit(hashes, num_tokens, find)
                num_tokens = len(hit) * self.block_size
                blocks += (hit,)
        return PrefixHit(num_tokens, blocks, from_cache=True)

    def keys(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Return the pool keys of the blocks with these hashes in all groups, in the order of the sequence."""
        of_groups = [keys for manager in self.managers if (keys := manager.keys(hashes))]
        return [key for keys in zip(*of_groups, strict=True) for key in keys]

    def get_swapped_blocks(self, request: CachedSequence) -> PrefixHit | None:
        """Return all that a swapped-out request had computed; None if it is not swapped out.

        Content that is on the device is shared there and not copied back.
        """
        swapped = self._pool.host.swapped.get(request.request_id)
        if swapped is None:
            return None
        return PrefixHit(
            swapped.num_tokens,
            tuple([self._pool.nearest(b) for b in table] for table in swapped.tables),
            is_mixed=request.request_id in self._mixed,
        )

    def get_forked_blocks(self, parent: CachedSequence, num_tokens: int) -> PrefixHit:
        """Return the first `num_tokens` tokens of a running request as a hit for a fork that begins with them.

        They must be computed before the fork's first plan runs. Full blocks are shared, with or without prefix
        caching; a last, partly filled one is copied. If a group has freed blocks that the fork would read, or has
        replaced a state, the hit has zero tokens.
        """
        tables = [manager.find_fork(parent.request_id, num_tokens) for manager in self.managers]
        found = tuple([table for table in tables if table is not None])
        if len(found) < len(tables):
            return self.no_hit
        return PrefixHit(num_tokens, found, is_mixed=parent.request_id in self._mixed)

    def branch(
        self, kept: Sequence[str], moves: Sequence[tuple[str, str]], num_tokens: int
    ) -> list[list[list[int]]] | None:
        """Start sequences from others (source, target) that have computed `num_tokens` tokens, as forks do.

        Then cover one more token of these, and of the `kept` sequences, which have as many. Targets have no tables;
        sources have no step in flight. All or nothing.

        Returns the new block ids of the kept sequences, or None if blocks are short. Nothing of these sequences is
        offered to the prefix cache, so all that is read no more is freed.
        """
        for name in kept:
            self._drop(name, num_tokens, cached_only=False)
        hits = [tuple([m.find_branch(source, num_tokens) for m in self.managers]) for source, _ in moves]
        grows = [name for name in kept if not self._covers(name, num_tokens + 1)]
        needed = sum([m.num_blocks_to_grow(name, num_tokens + 1) for name in grows for m in self.managers])
        for hit in hits:
            pairs = zip(self.managers, hit, strict=True)
            needed += sum([m.num_blocks_to_start(num_tokens + 1, blocks, num_tokens) for m, blocks in pairs])
        if needed > self._pool.num_free_blocks:
            return None
        for hit, (_, target) in zip(hits, moves, strict=True):
            self._start_branch(target, hit, num_tokens)
        new = {name: [manager.allocate(name, num_tokens + 1) for manager in self.managers] for name in grows}
        return [new.get(name, self._no_block_ids) for name in kept]

    def _start_branch(self, name: str, hit: tuple[list[KVCacheBlock], ...], num_tokens: int) -> None:
        tables = self._pool.take(hit, num_tokens // self.block_size)
        for manager, blocks, table in zip(self.managers, hit, tables, strict=True):
            manager.adopt(name, num_tokens, blocks, table)
            manager.allocate(name, num_tokens + 1)

    def free_tables(self, names: Sequence[str]) -> None:
        """Free the blocks of sequences that `branch` has started, or that it may start again."""
        for name in names:
            self._free_tables(name)

    def num_blocks_short(self, request: CachedSequence, hit: PrefixHit) -> int:
        """Return the missing free blocks for all known tokens of a request without blocks, given a hit.

        It fits now if this is 0 or less.
        """
        num_tokens, pairs = len(request.token_ids), zip(self.managers, hit.blocks, strict=True)
        needed = [
            manager.num_blocks_to_start(num_tokens, blocks, hit.num_tokens) for manager, blocks in pairs
        ]
        return sum(needed) - self._pool.num_free_blocks

    def num_blocks_to_finish(self, request: CachedSequence) -> int:
        """Return the blocks that a started request needs for all its known tokens beyond those it has.

        It gets them in steps, between which blocks are dropped.
        """
        request_id, num_tokens = request.request_id, len(request.token_ids)
        return sum([manager.num_blocks_to_finish(request_id, num_tokens) for manager in self.managers])

    def num_held_blocks(self, request: CachedSequence) -> int:
        """Return the blocks that a started request holds, exclusively or shared."""
        return sum([manager.num_held_blocks(request.request_id) for manager in self.managers])

    def start(self, request: CachedSequence, hit: PrefixHit, *, is_resumed: bool = False) -> None:
        """Start a request's tables with the blocks of a hit (possibly of zero tokens)."""
        num_full = hit.num_tokens // self.block_size
        tables = self._pool.take(hit.blocks, num_full)
        for manager, blocks, table in zip(self.managers, hit.blocks, tables, strict=True):
            manager.adopt(request.request_id, hit.num_tokens, blocks, table)
        self._pool.host.release(request.request_id)
        if hit.is_mixed:
            self._mixed.add(request.request_id)
        else:
            self._mixed.discard(request.request_id)
        if hit.from_cache and not is_resumed:
            self.prefix_queries += len(request.token_ids)
            self.prefix_hits += hit.num_tokens

    def allocate_slots(self, request: CachedSequence, num_new_tokens: int) -> list[list[int]] | None:
        """Cover `num_new_tokens` more tokens of a started request; all or nothing.

        Returns the new block ids, one read-only list per group (empty where the last block had room), or None if
        blocks are short. Blocks that the request reads no more are freed first.
        """
        request_id, num_computed_tokens = request.request_id, request.num_computed_tokens
        num_tokens = num_computed_tokens + num_new_tokens
        if self._covers(request_id, num_tokens):
            return self._no_block_ids
        will_cache = self.enable_prefix_caching and request_id not in self._mixed
        self._drop(request_id, num_computed_tokens, cached_only=will_cache)
        needed = sum([manager.num_blocks_to_grow(request_id, num_tokens) for manager in self.managers])
        if needed > self._pool.num_free_blocks:  # also free blocks of steps in flight
            self._drop(request_id, num_computed_tokens, cached_only=False)
        if needed > self._pool.num_free_blocks:
            return None
        return [manager.allocate(request_id, num_tokens) for manager in self.managers]

    def allocate_drafts(
        self, request: CachedSequence, num_tokens: int, num_kept_free: int
    ) -> list[list[int]] | None:
        """Cover `num_tokens` tokens, the last of which are drafts or of further decode steps; the others are covered.

        Returns the new block ids as `allocate_slots` does, or None if fewer than `num_kept_free` blocks would stay
        free.
        """
        request_id = request.request_id
        if self._covers(request_id, num_tokens):
            return self._no_block_ids
        needed = sum([manager.num_blocks_for_drafts(request_id, num_tokens) for manager in self.managers])
        if needed > self._pool.num_free_blocks - num_kept_free:
            return None
        return [manager.allocate_for_drafts(request_id, num_tokens) for manager in self.managers]

    def _covers(self, request_id: str, num_tokens: int) -> bool:
        """Return whether the request's tables cover `num_tokens` tokens already."""
        return self.managers[0].num_entries(request_id) * self.block_size >= num_tokens

    def _drop(self, request_id: str, num_computed_tokens: int, *, cached_only: bool) -> None:
        """Free blocks that are not read any more; see `SingleTypeManager.drop`."""
        for manager in self._dropping:
            manager.drop(request_id, num_computed_tokens, cached_only=cached_only)

    def cache_blocks(self, request: CachedSequence, num_computed_tokens: int) -> None:
        """Offer the full blocks of the first `num_computed_tokens` computed tokens to the prefix cache.

        Those of a request with blocks of other weights are not offered: each was computed from the ones before it.
        """
        num_full = num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or num_full == 0 or request.request_id in self._mixed:
            return
        if len(request.block_hashes) < num_full:
            extend_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
        start = min(manager.num_cached[request.request_id] for manager in self.managers)
        for manager in self.managers:
            manager.cache_blocks(request.request_id, request.block_hashes, num_full)
        if start < num_full and is_storable(request):
            self.transfers.note_cached(self.keys(request.block_hashes[start:num_full]))
        if self.events is not None:
            self.events.describe(request)

    def disown(self, request: CachedSequence) -> None:
        """Remove what a failed request has computed from the prefix cache, including before a preemption.

        Removal is by content: a copy on the host, or one swapped in by another request, may be as bad. A request that
        holds such blocks keeps them and reports errors of its own. What the request found in the cache when it first
        started was computed by others and stays.
        """
        hashes = request.block_hashes[request.num_cached_tokens // self.block_size :]
        for manager in self.managers:
            manager.forget_hashes(hashes)
        self.transfers.forget(self.keys(hashes))

    def trim(self, request: CachedSequence) -> None:
        """Free the device blocks of a started request that its next token does not read, or that were for drafts."""
        self._drop(request.request_id, request.num_computed_tokens, cached_only=False)
        for manager in self.managers:
            manager.truncate(request.request_id, request.num_computed_tokens)

    def preempt(self, request: CachedSequence) -> None:
        """Free a started request's device blocks; swap their content to the host if that is faster than recomputing."""
        request_id, num_tokens = request.request_id, request.num_computed_tokens
        self.trim(request)
        num_bytes = self.num_held_blocks(request) * self._block_bytes
        if self._prefers_swap(self._swap_costs, num_bytes, num_tokens):
            tables = [manager.tables[request_id] for manager in self.managers]
            self.num_swaps += self._pool.host.swap_out(request_id, tables, num_tokens)
        self._free_tables(request_id)

    def free(self, request: CachedSequence) -> None:
        """Free all blocks of a request on both tiers; a request without blocks is ignored."""
        self._free_tables(request.request_id)
        self._pool.host.release(request.request_id)
        self._mixed.discard(request.request_id)

    def _free_tables(self, request_id: str) -> None:
        self._pool.free_tables([manager.forget(request_id) for manager in self.managers])

    def pop_moves(self) -> PlannedMoves:
        """Return the copies that the plan must make before its forward pass; call once per plan."""
        return self._pool.pop_moves()

    def get_block_ids(self, request: CachedSequence) -> list[list[int]]:
        """Return all block ids of a request, one list per group."""
        return self.table_ids(request.request_id)

    def table_ids(self, name: str) -> list[list[int]]:
        """Return all block ids of a sequence, one list per group."""
        return [[block.block_id for block in manager.tables.get(name, ())] for manager in self.managers]

    def holders(self) -> set[str]:
        """Return ids of the requests that hold block tables."""
        return set(self.managers[0].tables)

    def swapped(self) -> set[str]:
        """Return ids of the requests that are swapped out."""
        return set(self._pool.host.swapped)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache on both tiers; False, and nothing done, while a request holds blocks."""
        return self._pool.reset_prefix_cache()

    def mix(self) -> None:
        """Clear the prefix cache on both tiers, because other weights compute from now on; requests keep their blocks.

        What these requests compute from now on depends on their old blocks, so it is never offered to others.
        """
        self._mixed |= self.holders() | self.swapped()
        self._pool.forget_all()

    @property
    def has_moves(self) -> bool:
        """True if the next plan must copy blocks."""
        return self._pool.has_moves

    def pop_events(self) -> list[KVCacheEvent]:
        """Return prefix cache events since the last call, in order; empty without `enable_events`."""
        return [] if self.events is None else self.events.take()

    def check_integrity(self) -> None:
        """Check every invariant of `quire.kv_cache.integrity`.

        Raises:
            IntegrityError: internal bug; holds the state.
        """
        check_integrity(self._pool, self.managers)


def is_swap_faster(costs: SwapCosts, num_bytes: int, num_tokens: int) -> bool:
    """Return whether copying `num_bytes` out and in takes less time than computing `num_tokens` again.

    Tokens that the prefix cache may still have are ignored: when the request returns, those are not copied either.
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
}  # --preemption-mode -> whether to swap, if the host has room
