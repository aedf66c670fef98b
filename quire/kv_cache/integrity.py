# SPDX-License-Identifier: Apache-2.0
"""Checks of the KV cache's invariants.

On each tier, with the tables of running requests on the device and of swapped requests on the host:

    1. A block is in the free queue exactly if it has no holder; the null block is neither free nor held.
    2. `ref_cnt` is the number of tables that hold the block, of planned moves that read it and of transfers that have
       borrowed it; a table holds a block once. The null block has no holder: it stands in a table where blocks were
       dropped, and where a recurrent state has none.
    3. A block in two tables is full (so it is computed) and has the same position in both.
    4. Hash -> block is a bijection between the cached hashes and the blocks that have one.

It follows from 1 that free + used = total. No request is on both tiers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from quire.kv_cache.block_pool import BlockPool, DevicePool, KVCacheBlock
from quire.kv_cache.single_type_manager import SingleTypeManager
from quire.kv_cache.spec import NULL_BLOCK_ID

Tables = Mapping[str, Sequence[KVCacheBlock]]  # Request id -> its blocks in one group, by position.


class IntegrityError(AssertionError):
    """Broken internal bookkeeping; `state` holds what is needed to debug it."""

    def __init__(self, message: str, state: Mapping[str, object]) -> None:
        super().__init__(f"{message}\n" + "\n".join(f"  {name}: {value}" for name, value in state.items()))
        self.state = state


def check_integrity(pool: DevicePool, managers: Sequence[SingleTypeManager]) -> None:
    """Raise IntegrityError, with the state of the tier, at the first invariant that does not hold."""
    device: list[Tables] = [manager.tables for manager in managers]
    swapped = pool.host.swapped
    host: list[Tables] = [
        {name: request.tables[group_id] for name, request in swapped.items()}
        for group_id in range(len(managers))
    ]
    with _state_if_broken(pool, device):
        for manager in managers:
            _check_gaps(manager)
        _check_tier(pool, device)
    with _state_if_broken(pool.host.pool, host):
        _check_tier(pool.host.pool, host)
        both = device[0].keys() & swapped.keys()
        _require(not both, "requests are on both tiers", sorted(both))


@contextmanager
def _state_if_broken(pool: BlockPool, tables: Sequence[Tables]) -> Iterator[None]:
    try:
        yield
    except _BrokenError as broken:
        raise IntegrityError(str(broken), _dump(pool, tables)) from None


def _check_tier(pool: BlockPool, tables: Sequence[Tables]) -> None:
    _check_free_queue(pool)
    _check_tables(pool, tables)
    _check_hashes(pool)


class _BrokenError(Exception):
    pass


def _require(condition: bool, message: str, *about: object) -> None:
    """Raise if the condition is false; `about` is formatted only on failure, so checks of large pools are cheap."""
    if not condition:
        raise _BrokenError(message + "".join(f", {item!r}" for item in about))


def _check_free_queue(pool: BlockPool) -> None:
    queued: set[int] = set()
    for block in pool.free_queue:
        _require(block.block_id not in queued, "a block is in the free queue twice", block)
        linked = block.prev_free is not None and block.prev_free.next_free is block
        _require(linked, "the free queue's links are broken", block)
        queued.add(block.block_id)
    _require(
        len(queued) == len(pool.free_queue), "the free queue miscounts", len(queued), len(pool.free_queue)
    )
    unheld = {block.block_id for block in pool.blocks if block.ref_cnt == 0} - {NULL_BLOCK_ID}
    _require(queued == unheld, "blocks are free and held, or lost", sorted(queued ^ unheld))


def _check_tables(pool: BlockPool, tables: Sequence[Tables]) -> None:
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)  # block id -> (group, position) per holder
    for group_id, group in enumerate(tables):
        for request_id, table in group.items():
            held = [(i, block) for i, block in enumerate(table) if block.block_id != NULL_BLOCK_ID]
            _require(
                len({block for _, block in held}) == len(held), "a table holds a block twice", request_id
            )
            for position, block in held:
                places[block.block_id].append((group_id, position))
    pins = Counter(block.block_id for block in pool.pinned)
    for block in pool.blocks:
        held_at = places.get(block.block_id, [])
        num_holders = len(held_at) + pins[block.block_id] + (block.block_id in pool.borrowed)
        _require(num_holders == block.ref_cnt, "references differ from holders", block, held_at)
        _require(len(set(held_at)) <= 1, "a block is at several (group, position)", block, held_at)
        _require(len(held_at) <= 1 or block.is_full, "a shared block is not full", block)
    _require(pool.blocks[NULL_BLOCK_ID].ref_cnt == 0, "the null block was given out")
    lengths = [{request_id: len(table) for request_id, table in group.items()} for group in tables]
    _require(all(entry == lengths[0] for entry in lengths), "groups cover different tokens", lengths)


def _check_gaps(manager: SingleTypeManager) -> None:
    for request_id, table in manager.tables.items():
        num_dropped = manager.num_dropped[request_id]
        gaps = [block.block_id == NULL_BLOCK_ID for block in table]
        _require(all(gaps[:num_dropped]), "a dropped block is still held", request_id)
        _require(
            manager.leaves_gaps or not any(gaps[num_dropped:]), "a table holds the null block", request_id
        )


def _check_hashes(pool: BlockPool) -> None:
    for block_hash, block in pool.cached_blocks.items():
        _require(block.block_hash == block_hash, "a block is cached under another's hash", block)
    hashed = [block for block in pool.blocks if block.block_hash is not None]
    _require(len(hashed) == len(pool.cached_blocks), "cached blocks cannot be found", hashed)
    _require(all(block.is_full for block in hashed), "a cached block is not full", hashed)


def _dump(pool: BlockPool, tables: Sequence[Tables]) -> dict[str, object]:
    return {
        "blocks": [repr(block) for block in pool.blocks if block.ref_cnt or block.block_hash],
        "free": _free_ids(pool),
        "cached": {key.hex()[:8]: block.block_id for key, block in pool.cached_blocks.items()},
        "tables": [{name: _ids(table) for name, table in group.items()} for group in tables],
    }


def _free_ids(pool: BlockPool) -> list[int]:
    """Return ids in queue order; bounded, because the queue itself may be broken."""
    return [block.block_id for block, _ in zip(pool.free_queue, pool.blocks, strict=False)]


def _ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]
