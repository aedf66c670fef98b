# SPDX-License-Identifier: Apache-2.0
"""Scheduler as a store outside the engine uses it (`quire.kv_store`): transfers of cache content."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.prefix_loads import PrefixLoad, begin_load, storable_keys
from quire.kv_cache.transfers import CacheWatch, Transfer
from quire.scheduler.queues import RequestQueues
from quire.scheduler.request import RequestStatus


class StoreAccess:
    """Base of `Scheduler` with what stores call between steps; the derived class sets the attributes."""

    _kv: KVCacheManager
    _queues: RequestQueues
    _is_paused: bool
    _computed_tokens_per_s: float

    def watch_cache(self) -> CacheWatch:
        """Return the changes of the prefix cache from now on."""
        return self._kv.transfers.watch()

    def storable_keys(self, request_id: str) -> list[BlockHash]:
        """Return the pool keys of a waiting request's prefix; none if it must not read the cache, or forks another.

        None either while the scheduler is paused, as the cache may be gone.
        """
        request = self._queues.by_id.get(request_id)
        if request is None or request.status is RequestStatus.RUNNING or not request.reads_prefix_cache:
            return []
        if self._is_paused or request.parent is not None:
            return []
        return storable_keys(self._kv, request)

    def next_resumed(self) -> tuple[str, int] | None:
        """Return the preempted request that the next plan resumes first, and how often it was preempted.

        None if that is no preempted request, lacks blocks, is swapped out, or must not read the cache.
        """
        may_be = self._queues.num_preemptions and not self._is_paused
        request = next(iter(self._queues.policy), None) if may_be else None
        if request is None or request.status is not RequestStatus.PREEMPTED or request.num_steps_in_flight:
            return None
        if not request.reads_prefix_cache or self._kv.get_swapped_blocks(request) is not None:
            return None
        is_short = self._kv.num_blocks_short(request, self._kv.get_computed_blocks(request)) > 0
        return None if is_short else (request.request_id, request.num_preemptions)

    def is_cached(self, key: BlockHash) -> bool:
        """Return whether content is in the prefix cache, on either tier."""
        return self._kv.pool.get_cached_block(key) is not None

    def begin_load(self, request_id: str, stored: Sequence[BlockHash]) -> PrefixLoad | None:
        """Borrow host blocks for what a store has of a waiting request's prefix; None if it does not wait any more.

        Each block is given back by `end_transfers`.
        """
        request = self._queues.by_id.get(request_id)
        if request is None or request.status is RequestStatus.RUNNING:
            return None
        return begin_load(self._kv, request, stored)

    def begin_saves(self, keys: Sequence[BlockHash]) -> list[Transfer]:
        """Borrow host blocks with the content of those keys that can be saved, once the next plan has run."""
        return self._kv.transfers.begin_saves(keys)

    def end_transfers(self, moved: Sequence[tuple[int, bool]]) -> None:
        """Give host blocks back, (block id, has moved), in the order of their sequence; see `HostTransfers.end`."""
        self._kv.transfers.end(moved)

    def note_outside(self, stored: Sequence[BlockHash], removed: Sequence[BlockHash], medium: str) -> None:
        """Report to subscribers blocks that a store outside the engine has lost, and those that it has."""
        if self._kv.events is not None:
            self._kv.events.removed_outside(removed, medium)
            self._kv.events.stored_outside(stored, medium)

    def forget_outside(self) -> None:
        """Report to subscribers that no store outside the engine has blocks of these weights."""
        if self._kv.events is not None:
            self._kv.events.forget_outside()

    def computing_s(self, num_keys: int) -> float:
        """Estimate the seconds that computing the content of pool keys takes."""
        return num_keys * self._kv.tokens_per_key / self._computed_tokens_per_s

    def tokens_of(self, num_keys: int) -> int:
        """Return the tokens at the start of a sequence that its first pool keys hold."""
        return int(num_keys * self._kv.tokens_per_key)

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that transfers can get now."""
        return self._kv.transfers.num_free_blocks
