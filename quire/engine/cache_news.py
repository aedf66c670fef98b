"""What a core tells of its prefix cache, for whoever chooses among cores: which blocks of prompts can be found there.

Invariant: who takes in all news of a core, in order, knows the blocks on its device that it has stored since then, each
by the start of its hash: two may have the same, at which an estimate is wrong and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from quire.kv_cache.events import DEVICE, AllBlocksCleared, BlockStored, KVCacheEvent
from quire.kv_cache.hashing import BlockHash

KEY_BYTES = 8
_FIRST_GROUP = 0
"""Groups of a hybrid model share the hashes, and mostly keep and lose the same blocks."""


class CacheNews(msgspec.Struct, array_like=True, frozen=True):
    """Since the last: all was forgotten, if so, and then some blocks were stored and others lost; keys side by side."""

    stored: bytes
    lost: bytes
    is_cleared: bool = False


class CacheNotes:
    """Gathers events of a KV cache until somebody takes the news."""

    def __init__(self) -> None:
        self._is_cleared = False
        self._is_there: dict[bytes, bool] = {}

    def note(self, events: Iterable[KVCacheEvent]) -> None:
        """In the order in which they happened."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._is_cleared = True
                self._is_there.clear()
            elif (event.medium, event.group_idx) == (DEVICE, _FIRST_GROUP):
                keys = (_key(block_hash) for block_hash in event.block_hashes)
                self._is_there.update(dict.fromkeys(keys, isinstance(event, BlockStored)))

    def take(self) -> CacheNews | None:
        """What was noted since the last call, if anything was."""
        found, self._is_there = self._is_there, {}
        is_cleared, self._is_cleared = self._is_cleared, False
        if not found and not is_cleared:
            return None
        stored, lost = (
            b"".join(key for key, is_there in found.items() if is_there is wanted) for wanted in (True, False)
        )
        return CacheNews(stored, lost, is_cleared)


def keys_of(hashes: Iterable[BlockHash]) -> list[int]:
    """By which blocks are known in news."""
    return [int.from_bytes(block_hash[:KEY_BYTES], "big") for block_hash in hashes]


def keys_in(told: bytes) -> Iterator[int]:
    """Those of news."""
    return (int.from_bytes(told[at : at + KEY_BYTES], "big") for at in range(0, len(told), KEY_BYTES))


def _key(block_hash: BlockHash | int) -> bytes:
    assert isinstance(block_hash, bytes), "news are noted before hashes are shortened for subscribers"
    return block_hash[:KEY_BYTES]
