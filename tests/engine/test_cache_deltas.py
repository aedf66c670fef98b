# SPDX-License-Identifier: Apache-2.0
"""Test of prefix cache deltas: a receiver that applies them holds exactly the blocks on the device."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv_cache.events import (
    DEVICE,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from quire.routing.cache_deltas import CacheDeltaBuffer, block_keys
from quire.routing.router import CachedPrefixes

BLOCKS = [bytes([number]) * 32 for number in range(6)]


def stored(hashes: list[bytes], medium: str = DEVICE, group: int = 0) -> BlockStored:
    return BlockStored([*hashes], None, [], 16, None, medium, None, None, group)


some = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4, unique=True)
events: st.SearchStrategy[Any] = st.one_of(
    some.map(stored),
    some.map(lambda hashes: stored(hashes, HOST)),
    some.map(lambda hashes: stored(hashes, group=1)),
    some.map(lambda hashes: BlockRemoved([*hashes], DEVICE, 0)),
    some.map(lambda hashes: BlockRemoved([*hashes], HOST, 0)),
    st.just(AllBlocksCleared()),
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.tuples(events, st.booleans()), max_size=30))
def test_received_deltas_match_the_device_blocks(happened: list[tuple[KVCacheEvent, bool]]) -> None:
    notes, known, there = CacheDeltaBuffer(), CachedPrefixes(0), set[bytes]()
    for event, is_taken in happened:
        notes.note([event])
        if isinstance(event, AllBlocksCleared):
            there.clear()
        elif (event.medium, event.group_idx) == (DEVICE, 0):
            hashes = {block for block in event.block_hashes if isinstance(block, bytes)}
            there = there | hashes if isinstance(event, BlockStored) else there - hashes
        if is_taken and (news := notes.take()) is not None:
            known.apply(news)
    if (news := notes.take()) is not None:
        known.apply(news)
    assert notes.take() is None
    assert [key in known for key in block_keys(BLOCKS)] == [block in there for block in BLOCKS]
