# SPDX-License-Identifier: Apache-2.0
"""Prefix cache deltas of a core, by which routers know the blocks that it has stored.

Invariant: applying all deltas of a core in order yields the blocks stored on its device since then, each identified by
a prefix of its hash. A collision only makes an estimate wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quire.config import EngineConfig
from quire.engine.core_feature import CoreFeature
from quire.engine.messages import CacheDelta
from quire.engine.step_loop import Clock
from quire.executor.base import Executor
from quire.kv_cache.events import DEVICE, AllBlocksCleared, BlockStored, KVCacheEvent
from quire.kv_cache.hashing import BlockHash
from quire.scheduler.scheduler import Scheduler

KEY_BYTES = 8
_FIRST_GROUP = 0  # Groups of a hybrid model share the hashes, and mostly keep and lose the same blocks.


class CacheDeltaBuffer:
    """Buffer of KV cache events until the next delta is taken."""

    def __init__(self) -> None:
        self._is_cleared = False
        self._is_stored: dict[bytes, bool] = {}

    def note(self, events: Iterable[KVCacheEvent]) -> None:
        """Add events in the order in which they happened."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._is_cleared = True
                self._is_stored.clear()
            elif (event.medium, event.group_idx) == (DEVICE, _FIRST_GROUP):
                keys = (_key(block_hash) for block_hash in event.block_hashes)
                self._is_stored.update(dict.fromkeys(keys, isinstance(event, BlockStored)))

    def take(self) -> CacheDelta | None:
        """Return the changes since the last call, if there were any."""
        found, self._is_stored = self._is_stored, {}
        is_cleared, self._is_cleared = self._is_cleared, False
        if not found and not is_cleared:
            return None
        stored, lost = (
            b"".join(key for key, is_there in found.items() if is_there is wanted) for wanted in (True, False)
        )
        return CacheDelta(stored, lost, is_cleared)


def block_keys(hashes: Iterable[BlockHash]) -> list[int]:
    """Return the keys by which deltas identify blocks."""
    return [int.from_bytes(block_hash[:KEY_BYTES], "big") for block_hash in hashes]


def delta_keys(keys: bytes) -> Iterator[int]:
    """Yield the keys of a delta."""
    return (int.from_bytes(keys[at : at + KEY_BYTES], "big") for at in range(0, len(keys), KEY_BYTES))


def _key(block_hash: BlockHash | int) -> bytes:
    assert isinstance(block_hash, bytes), "deltas are recorded before hashes are shortened for subscribers"
    return block_hash[:KEY_BYTES]


class CacheDeltas(CoreFeature):
    """Deltas of one core, sent with the outputs of its steps."""

    reads_kv_events = True

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__(config, executor, scheduler, clock)
        self._buffer = CacheDeltaBuffer()

    @staticmethod
    def is_wanted(config: EngineConfig) -> bool:
        return config.tells_cache

    def note_kv_events(self, events: Sequence[KVCacheEvent]) -> None:
        self._buffer.note(events)

    def pop_cache_delta(self) -> CacheDelta | None:
        return self._buffer.take()
