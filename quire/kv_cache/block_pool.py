# SPDX-License-Identifier: Apache-2.0
"""Block pools of device and host: holders, free blocks, and reusable prefixes.

Invariant (`BlockPool`): every block but the null block is either held (`ref_cnt` > 0) or in the free queue, never
both. A free block with a hash is still cached: `touch` revives it until `get_new_blocks` takes it.

Invariant (`DevicePool`): the content of a hit is on the device when the next forward pass runs. A full block on the
device is shared; one on the host is swapped into a new block; a partly filled one, which its new holder will write
to, is copied into a new block (copy-on-write).

Invariant (`HostTier`, for preempted requests and evicted prefixes): a host block is written by a planned swap-out
before anything can refer to it. Blocks of swapped requests are held until the request returns or finishes; all
others with a prefix may be evicted, least recently used first. Content is identified by its hash as on the device, so
a prefix is kept once for all swapped requests that begin with it, and is not copied again.

Invariant (`BlockMoves`): all swap-outs run first, then all swap-ins, then all copies. The result equals that of the
moves in planning order, because a source block stays pinned until the plan is sealed and so cannot become the target
of a later move of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from quire.kv_cache.events import DEVICE, HOST, KVEventLog
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.spec import NULL_BLOCK_ID

Move = tuple[int, int]  # (source, target) block ids


class PlannedMoves(NamedTuple):
    """Moves of one plan; in each list the targets are distinct and no source is a target."""

    swap_outs: list[Move]  # device block -> host block
    swap_ins: list[Move]  # host block -> device block
    block_copies: list[Move]  # device block -> device block


class BlockMoves:
    """Collector of block moves for the plan under construction."""

    def __init__(self) -> None:
        self._swap_outs: dict[int, int] = {}  # host block -> device block
        self._swap_ins: list[Move] = []
        self._block_copies: dict[int, int] = {}  # target -> source

    def swap_out(self, device_block: int, host_block: int) -> None:
        """Plan a copy to the host; it replaces an earlier one to the same host block, evicted meanwhile."""
        self._swap_outs[host_block] = device_block

    def swap_in(self, host_block: int, device_block: int) -> None:
        """Plan a copy to the device."""
        self._swap_ins.append((host_block, device_block))

    def copy(self, source: int, target: int) -> None:
        """Plan a copy on the device; a copy of a planned target reads the original source."""
        self._block_copies[target] = self._block_copies.get(source, source)

    def __bool__(self) -> bool:
        return bool(self._swap_outs or self._swap_ins or self._block_copies)

    def take(self) -> PlannedMoves:
        """Return all moves planned since the last call."""
        swap_outs = [(device, host) for host, device in self._swap_outs.items()]
        block_copies = [(source, target) for target, source in self._block_copies.items()]
        moves = PlannedMoves(swap_outs, self._swap_ins, block_copies)
        self._swap_outs, self._swap_ins, self._block_copies = {}, [], {}
        return moves


class KVCacheBlock:
    """One block: `ref_cnt` tables hold it; `block_hash` is set while it can be found by its content.

    `is_full`: known to be full, and so not written to while it is held.
    """

    __slots__ = ("block_hash", "block_id", "is_full", "next_free", "on_host", "prev_free", "ref_cnt")

    def __init__(self, block_id: int, *, on_host: bool = False) -> None:
        self.block_id = block_id
        self.on_host = on_host
        self.is_full = False
        self.ref_cnt = 0
        self.block_hash: BlockHash | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        name = self.block_hash.hex()[:8] if self.block_hash else None
        tier = "host " if self.on_host else ""
        return f"KVCacheBlock({tier}{self.block_id}, ref_cnt={self.ref_cnt}, hash={name})"


class FreeBlockQueue:
    """Free blocks in eviction order: the first is given out next.

    A doubly linked list through the blocks themselves, because a prefix hit takes a block out of the middle:
    O(1) here and O(n) in a `collections.deque`. An ordered dict would do it too, but allocates per operation.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock] = ()) -> None:
        self._num_blocks = len(blocks)
        self._end = KVCacheBlock(-1)  # sentinel: its next is the first block, its prev the last
        for block, following in pairwise([self._end, *blocks, self._end]):
            block.next_free, following.prev_free = following, block

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._end.next_free
        while block is not self._end:
            assert block is not None, "the free list is broken"
            yield block
            block = block.next_free

    def pop_first(self) -> KVCacheBlock:
        """Take the next block in eviction order; the queue must not be empty."""
        first = self._end.next_free
        assert first is not None
        assert first is not self._end, "no free block left"
        self.remove(first)
        return first

    def append(self, block: KVCacheBlock) -> None:
        """Add as the last to be given out."""
        self._link(block, before=self._end)

    def prepend(self, block: KVCacheBlock) -> None:
        """Add as the next to be given out."""
        first = self._end.next_free
        assert first is not None
        self._link(block, before=first)

    def remove(self, block: KVCacheBlock) -> None:
        """Remove a block at any position."""
        before, after = block.prev_free, block.next_free
        assert before is not None, f"{block!r} is not in the free queue"
        assert after is not None
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._num_blocks -= 1

    def _link(self, block: KVCacheBlock, before: KVCacheBlock) -> None:
        assert block.next_free is None, f"{block!r} is in the free queue already"
        previous = before.prev_free
        assert previous is not None
        block.prev_free, block.next_free = previous, before
        previous.next_free = before.prev_free = block
        self._num_blocks += 1


class BlockPool:
    """Owner of `num_blocks` blocks of one tier; block 0, the null block, is never given out.

    Stored and removed hashes are reported to `events`, if given, with this tier's medium.
    """

    def __init__(self, num_blocks: int, *, on_host: bool = False, events: KVEventLog | None = None) -> None:
        assert num_blocks >= 1, "the pool needs room for the null block"
        self.blocks = tuple(KVCacheBlock(block_id, on_host=on_host) for block_id in range(num_blocks))
        self.free_queue = FreeBlockQueue(self.blocks[NULL_BLOCK_ID + 1 :])
        self._cached: dict[BlockHash, KVCacheBlock] = {}
        self._pinned: list[KVCacheBlock] = []
        self._borrowed: dict[int, KVCacheBlock] = {}
        self._medium = HOST if on_host else DEVICE
        self._events = events

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be held at once."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached or not."""
        return len(self.free_queue)

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that is held, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks if self.num_usable_blocks else 0.0

    @property
    def is_held(self) -> bool:
        """True if any block is held."""
        return self.num_free_blocks < self.num_usable_blocks

    @property
    def pinned(self) -> Sequence[KVCacheBlock]:
        """Read-only view: blocks with a reference for a planned move that reads them."""
        return tuple(self._pinned)

    @property
    def borrowed(self) -> Mapping[int, KVCacheBlock]:
        """Read-only view: block id -> block that a transfer with a store outside the engine holds."""
        return MappingProxyType(self._borrowed)

    @property
    def cached_blocks(self) -> Mapping[BlockHash, KVCacheBlock]:
        """Read-only view: hash -> the one block that holds this content."""
        return MappingProxyType(self._cached)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Give out blocks with `ref_cnt` 1, evicting what they cached; that many must be free."""
        assert num_blocks <= self.num_free_blocks, f"{num_blocks} blocks wanted, {self.num_free_blocks} free"
        blocks = [self.free_queue.pop_first() for _ in range(num_blocks)]
        for block in blocks:
            self._evict(block)
            block.ref_cnt = 1
            block.is_full = False
        return blocks

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """Return the block with this content, held or free, or None."""
        return self._cached.get(block_hash)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add one holder to each block; a free one leaves the free queue and keeps its content."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def refresh(self, chain: Sequence[KVCacheBlock]) -> None:
        """Make blocks of a sequence the most recently used ones."""
        self.touch(chain)
        self.free(chain)

    def free(self, chain: Sequence[KVCacheBlock]) -> None:
        """Drop one holder of each block of a sequence, given in the sequence's order.

        Blocks without a holder are queued tail first: a prefix is useful without what follows it, never
        the other way round. A block without a hash holds nothing to reuse and is given out before all others.
        """
        for block in reversed(chain):
            assert block.ref_cnt > 0, f"{block!r} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (self.free_queue.prepend if block.block_hash is None else self.free_queue.append)(block)

    def free_tables(self, tables: Sequence[Sequence[KVCacheBlock]]) -> None:
        """Drop a sequence's tables, one per group, as one chain: a prefix needs the blocks of all groups.

        The null block, which stands where a group has none, is skipped.
        """
        chain = [block for entries in zip(*tables, strict=True) for block in entries]
        self.free([block for block in chain if block.block_id != NULL_BLOCK_ID])

    def pin(self, block: KVCacheBlock) -> None:
        """Hold a block until the plan is sealed, because a planned move reads it."""
        self.touch([block])
        self._pinned.append(block)

    def unpin(self) -> None:
        """Release all pinned blocks."""
        if self._pinned:
            self.free(self._pinned)
            self._pinned = []

    def borrow(self, block: KVCacheBlock) -> None:
        """Hand the present reference of a block, which no other transfer has, to a transfer."""
        assert block.ref_cnt > 0, f"{block!r} is borrowed without a holder"
        assert block.block_id not in self._borrowed, f"{block!r} is borrowed twice"
        self._borrowed[block.block_id] = block

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Release borrowed blocks of a sequence, in the sequence's order."""
        self.free([self._borrowed.pop(block_id) for block_id in block_ids])

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], hashes: Sequence[BlockHash]) -> None:
        """Make full, computed blocks findable; content that another block holds already keeps that block.

        Blocks cached under the same hashes already are accepted.
        """
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert block.ref_cnt > 0, f"{block!r} is cached without a holder"
            assert block.block_hash in (None, block_hash), f"{block!r} is cached twice"
            block.is_full = True
            if block.block_hash is None and self._cached.setdefault(block_hash, block) is block:
                block.block_hash = block_hash
                if self._events is not None:
                    self._events.stored(block_hash, self._medium)

    def forget(self, block_hash: BlockHash) -> None:
        """Remove content from the prefix cache; holders keep its block. Unknown hashes are ignored."""
        block = self._cached.get(block_hash)
        if block is None:
            return
        self._unname(block)
        if block.ref_cnt == 0:  # nothing to reuse, so it is given out before all others
            self.free_queue.remove(block)
            self.free_queue.prepend(block)

    def reset_prefix_cache(self) -> bool:
        """Clear all cached content; refused (False) while any block is held."""
        if self.is_held:
            return False
        self.forget_all()
        return True

    def forget_all(self) -> None:
        """Clear all cached content; holders keep their blocks, which cannot be found any more."""
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()
        if self._events is not None and self._medium == DEVICE:  # one event covers all media
            self._events.cleared()

    def _evict(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self._unname(block)

    def _unname(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None, f"{block!r} is not cached"
        del self._cached[block.block_hash]
        if self._events is not None:
            self._events.removed(block.block_hash, self._medium)
        block.block_hash = None


class SwappedRequest(NamedTuple):
    """First `num_tokens` tokens of a preempted request; one list of blocks per group, by position.

    The device's null block stands where the request had none.
    """

    num_tokens: int
    tables: tuple[list[KVCacheBlock], ...]


class HostTier:
    """Owner of `num_blocks` host blocks, numbered from 1; disabled with none."""

    def __init__(self, num_blocks: int, moves: BlockMoves, events: KVEventLog | None = None) -> None:
        self.pool = BlockPool(num_blocks + 1, on_host=True, events=events)
        self._moves = moves
        self._swapped: dict[str, SwappedRequest] = {}

    @property
    def swapped(self) -> Mapping[str, SwappedRequest]:
        """Read-only view: request id -> its swapped-out blocks."""
        return MappingProxyType(self._swapped)

    def offload(self, block: KVCacheBlock) -> None:
        """Keep the content of a device block that is being evicted, unless every host block is held."""
        known = self._find(block)
        if known is not None:
            self.pool.refresh([known])
        elif self.pool.num_free_blocks:
            self.pool.free([self.copy(block)])

    def swap_out(self, request_id: str, tables: Sequence[Sequence[KVCacheBlock]], num_tokens: int) -> bool:
        """Keep all blocks of a request; False, and nothing planned, if the host has no room for them."""
        assert request_id not in self._swapped, f"request {request_id} is swapped out already"
        blocks = [block for table in tables for block in table if block.block_id != NULL_BLOCK_ID]
        known = {block: kept for block in blocks if (kept := self._find(block)) is not None}
        self.pool.touch(known.values())
        if len(blocks) - len(known) > self.pool.num_free_blocks:
            self.pool.free([*known.values()])
            return False
        copies = {block: known.get(block) or self.copy(block) for block in blocks}
        self._swapped[request_id] = SwappedRequest(
            num_tokens, tuple([copies.get(block, block) for block in table] for table in tables)
        )
        return True

    def release(self, request_id: str) -> None:
        """Release a swapped request's blocks; unknown ids are ignored."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self.pool.free_tables(swapped.tables)

    def _find(self, block: KVCacheBlock) -> KVCacheBlock | None:
        """Return the host block with a device block's content, if it is known by its hash."""
        return self.pool.get_cached_block(block.block_hash) if block.block_hash is not None else None

    def copy(self, block: KVCacheBlock) -> KVCacheBlock:
        """Allocate a host block, held once, and plan the copy of a device block into it."""
        (kept,) = self.pool.get_new_blocks(1)
        if block.block_hash is not None:
            self.pool.cache_full_blocks([kept], [block.block_hash])
        self._moves.swap_out(block.block_id, kept.block_id)
        return kept


class DevicePool(BlockPool):
    """Device block pool that evicts content to the host tier and fetches it back."""

    def __init__(self, num_blocks: int, num_host_blocks: int = 0, events: KVEventLog | None = None) -> None:
        super().__init__(num_blocks, events=events)
        self._moves = BlockMoves()
        self.host = HostTier(num_host_blocks, self._moves, events)

    @property
    def has_moves(self) -> bool:
        """True if moves were planned since `pop_moves`."""
        return bool(self._moves)

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """Return the block with this content, on the device if it is there, else on the host, or None."""
        return super().get_cached_block(block_hash) or self.host.pool.get_cached_block(block_hash)

    def nearest(self, block: KVCacheBlock) -> KVCacheBlock:
        """Return the device block with the same content, if there is one, else the block itself."""
        return block if block.block_hash is None else super().get_cached_block(block.block_hash) or block

    def num_held(self, hit: Sequence[KVCacheBlock], num_full: int) -> int:
        """Count blocks of a hit, the first `num_full` of which are full, for which `take` needs no free block."""
        return sum(block.ref_cnt > 0 and not block.on_host for block in hit[:num_full])

    def take(self, tables: Sequence[Sequence[KVCacheBlock]], num_full: int) -> list[list[KVCacheBlock]]:
        """Hold the content of a hit, in tables of which the first `num_full` blocks are full.

        Blocks that are not full are copied. Returns device blocks in the same order, and the null block where a table
        has it. Everything to be shared or copied is held before new blocks are allocated, because allocation evicts.
        """
        entries = [(i, block) for table in tables for i, block in enumerate(table)]
        blocks = [(i, block) for i, block in entries if block.block_id != NULL_BLOCK_ID]
        sources = [block for i, block in blocks if block.on_host or i >= num_full]
        self._share([block for i, block in blocks if i < num_full and not block.on_host])
        for source in sources:
            (self.host.pool if source.on_host else self).pin(source)
        filled = dict(zip(sources, self.get_new_blocks(len(sources)), strict=True))
        for source, target in filled.items():
            plan = self._moves.swap_in if source.on_host else self._moves.copy
            plan(source.block_id, target.block_id)
        return [[filled.get(block, block) for block in table] for table in tables]

    def pop_moves(self) -> PlannedMoves:
        """Return the moves that the plan must make; their sources may be evicted or freed after it."""
        self.unpin()
        self.host.pool.unpin()
        return self._moves.take()

    def forget(self, block_hash: BlockHash) -> None:
        """Remove content from the prefix cache on both tiers."""
        super().forget(block_hash)
        self.host.pool.forget(block_hash)

    def reset_prefix_cache(self) -> bool:
        """Clear all cached content on both tiers; refused (False) while any block is held."""
        if self.host.pool.is_held:
            return False
        return super().reset_prefix_cache()

    def forget_all(self) -> None:
        """Clear all cached content on both tiers; holders keep their blocks."""
        super().forget_all()
        self.host.pool.forget_all()

    def _share(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.touch(blocks)
        for block in blocks:
            block.is_full = True

    def _evict(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self.host.offload(block)
        super()._evict(block)
