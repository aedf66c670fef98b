# SPDX-License-Identifier: Apache-2.0
"""KV events: changes of the prefix cache as data for subscribers.

Invariant: applying all events in order to an empty set of (medium, group, block hash) yields exactly the
blocks that a request can find, on the engine's own tiers and in its directory (`quire.kv_store`). Fields have
vLLM's order, so that its subscribers can decode them.

A medium is a tier. The host tier reports as the device does, with its own medium and without the tokens. Content that
is evicted to the host is stored there and then removed from the device. Content that comes back is stored on the
device again, by the request that uses it. A store outside the engine keeps its blocks when the others are cleared, and
reports them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from quire.adapters import name_in
from quire.kv_cache.hashing import HASH_BYTES, BlockHash, ExtraKeys

DEVICE = "GPU"  # Medium of the blocks used for computing, on any device; vLLM's name.
HOST = "CPU"  # Medium of the host tier.
DISK = "DISK"  # Medium of a directory.


class BlockStored(msgspec.Struct, tag=True, array_like=True):
    """Consecutive blocks of one sequence that were added to the prefix cache.

    Args:
        block_hashes: in sequence order, outside the engine in any; integers if subscribers want short ones.
        parent_block_hash: hash of the block before them; None at the start of a sequence, or if `token_ids` is empty.
        token_ids: their content; empty if it was reported when they were stored on another medium.
        block_size: tokens per block.
        lora_id: always None; older subscribers expect the field.
        medium: tier of the blocks.
        lora_name: name of the adapter.
        extra_keys: per block; None if no block has any.
        group_idx: KV cache group; the groups of a hybrid model share the hashes.
    """

    block_hashes: list[BlockHash | int]
    parent_block_hash: BlockHash | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[ExtraKeys] | None
    group_idx: int


class BlockRemoved(msgspec.Struct, tag=True, array_like=True):
    """Blocks of a medium and a group that were removed from the prefix cache."""

    block_hashes: list[BlockHash | int]
    medium: str
    group_idx: int


class AllBlocksCleared(msgspec.Struct, tag=True, array_like=True):
    """Removal of all blocks on all media; those that a store keeps are reported as stored next."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    """Events of one step; `ts` is in seconds since 1970."""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int = 0


class HashedSequence(Protocol):
    """Fields of a sequence that the event log reads."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def block_hashes(self) -> list[BlockHash]: ...
    @property
    def extra_keys(self) -> ExtraKeys: ...


class KVEventLog:
    """Collector of events from the block pools; exists only if events are enabled."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVCacheEvent] = []
        self._undescribed: list[tuple[BlockHash, int]] = []
        self._outside: dict[BlockHash, str] = {}  # key -> medium

    def stored(self, key: BlockHash, medium: str = DEVICE) -> None:
        """Record that a block can be found by this key; for a device block, `describe` adds the content."""
        block_hash, group_id = _split(key)
        if medium == DEVICE:
            self._undescribed.append((block_hash, group_id))
        else:
            self._events.append(self._stored(medium, group_id, block_hashes=[block_hash]))

    def describe(self, sequence: HashedSequence) -> None:
        """Describe the blocks stored on the device since the last call; all belong to this sequence, group by group."""
        new, self._undescribed = self._undescribed, []
        places = _places({block_hash for block_hash, _ in new}, sequence.block_hashes)
        stored: BlockStored | None = None
        before = (-1, -1)
        for block_hash, group_id in new:
            place = places[block_hash]
            if stored is None or before != (group_id, place - 1):
                stored = self._open(sequence, place, group_id)
            self._add_block(stored, sequence, place)
            before = (group_id, place)

    def removed(self, key: BlockHash, medium: str = DEVICE) -> None:
        """Record that a block can no longer be found by this key."""
        block_hash, group_id = _split(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, group_id):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash], medium, group_id))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())
        kept, self._outside = self._outside, {}
        for medium in dict.fromkeys(kept.values()):
            self.stored_outside([key for key, place in kept.items() if place == medium], medium)

    def stored_outside(self, keys: Sequence[BlockHash], medium: str) -> None:
        """Record that a store has blocks; those that it is known to have are ignored."""
        groups: dict[int, list[BlockHash | int]] = {}
        for key in keys:
            if key not in self._outside:
                self._outside[key] = medium
                block_hash, group_id = _split(key)
                groups.setdefault(group_id, []).append(block_hash)
        for group_id, hashes in groups.items():
            self._events.append(self._stored(medium, group_id, hashes))

    def forget_outside(self) -> None:
        """Record that stores have none of the blocks that they are known to have."""
        for medium in dict.fromkeys(self._outside.values()):
            self.removed_outside([key for key, place in self._outside.items() if place == medium], medium)

    def removed_outside(self, keys: Sequence[BlockHash], medium: str) -> None:
        """Record that a store has lost blocks; those that it is not known to have are ignored."""
        for key in keys:
            if self._outside.pop(key, None) is not None:
                self.removed(key, medium)

    def take(self) -> list[KVCacheEvent]:
        """Return all events since the last call, in order."""
        assert not self._undescribed, "stored blocks were not described"
        events, self._events = self._events, []
        return events

    def _open(self, sequence: HashedSequence, place: int, group_id: int) -> BlockStored:
        stored, keys = self._stored(DEVICE, group_id, block_hashes=[]), sequence.extra_keys
        stored.parent_block_hash = sequence.block_hashes[place - 1] if place else None
        stored.lora_name = None if keys.adapter is None else name_in(keys.adapter)
        stored.extra_keys = None if keys == ExtraKeys(None) else []
        self._events.append(stored)
        return stored

    def _stored(self, medium: str, group_id: int, block_hashes: list[BlockHash | int]) -> BlockStored:
        """Build an event without the content."""
        return BlockStored(block_hashes, None, [], self._block_size, None, medium, None, None, group_id)

    def _add_block(self, stored: BlockStored, sequence: HashedSequence, place: int) -> None:
        start, end = place * self._block_size, (place + 1) * self._block_size
        stored.block_hashes.append(sequence.block_hashes[place])
        stored.token_ids += sequence.token_ids[start:end]
        if stored.extra_keys is not None:
            stored.extra_keys.append(sequence.extra_keys.of_block(start, end))


def _split(key: BlockHash) -> tuple[BlockHash, int]:
    """Split a block pool key into content hash and group id."""
    return key[:HASH_BYTES], int.from_bytes(key[HASH_BYTES:], "big")


def _places(wanted: set[BlockHash], hashes: list[BlockHash]) -> dict[BlockHash, int]:
    """Return hash -> index; searched from the end, because the newest blocks are there."""
    places: dict[BlockHash, int] = {}
    place = len(hashes)
    while len(places) < len(wanted):
        place -= 1
        if hashes[place] in wanted:
            places[hashes[place]] = place
    return places
