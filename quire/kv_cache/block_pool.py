"""The blocks of the KV cache: who holds them, which are free, and which hold a reusable prefix.

Invariant: every block but the null block is either held (`ref_cnt` > 0) or in the free queue, never both. A
free block that has a hash is still cached: it can be revived by `touch` until `get_new_blocks` takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from quire.kv_cache.events import DEVICE, HOST, KVEventLog
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.spec import NULL_BLOCK_ID


class KVCacheBlock:
    """One block: `ref_cnt` tables hold it; `block_hash` is set while it can be found by its content.

    `is_full` says that it is known to be full, and so will not be written to while anybody holds it.
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

    def __init__(self) -> None:
        self._num_blocks = 0
        self._end = KVCacheBlock(-1)  # sentinel: its next is the first block, its prev the last
        self._end.next_free = self._end.prev_free = self._end

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._end.next_free
        while block is not self._end:
            assert block is not None, "the free list is cut"
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
        """Take a block out from wherever it stands."""
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
    """Owns `num_blocks` blocks of one tier, of which block 0, the null block, is never given out.

    What can be found by its hash, and what no longer can, is told to `events` if there is one, as of this tier.
    """

    def __init__(self, num_blocks: int, *, on_host: bool = False, events: KVEventLog | None = None) -> None:
        assert num_blocks >= 1, "the pool needs room for the null block"
        self.blocks = tuple(KVCacheBlock(block_id, on_host=on_host) for block_id in range(num_blocks))
        self.free_queue = FreeBlockQueue()
        for block in self.blocks[NULL_BLOCK_ID + 1 :]:
            self.free_queue.append(block)
        self._cached: dict[BlockHash, KVCacheBlock] = {}
        self._pinned: list[KVCacheBlock] = []
        self._medium = HOST if on_host else DEVICE
        self._events = events

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be held at once."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had now, cached or not."""
        return len(self.free_queue)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is held, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks if self.num_usable_blocks else 0.0

    @property
    def is_held(self) -> bool:
        """Whether anybody holds a block."""
        return self.num_free_blocks < self.num_usable_blocks

    @property
    def pinned(self) -> Sequence[KVCacheBlock]:
        """Read-only view: blocks with a reference for a planned move that reads them."""
        return tuple(self._pinned)

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
        """The block with this content, held or free, or None."""
        return self._cached.get(block_hash)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add one holder to each block; a free one leaves the free queue and keeps its content."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free(self, chain: Sequence[KVCacheBlock]) -> None:
        """Drop one holder of each block of a sequence, given in the sequence's order.

        Blocks nobody holds any more are queued tail first: a prefix is useful without what follows it, never
        the other way round. A block without a hash holds nothing to reuse and is given out before all others.
        """
        for block in reversed(chain):
            assert block.ref_cnt > 0, f"{block!r} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (self.free_queue.prepend if block.block_hash is None else self.free_queue.append)(block)

    def free_tables(self, tables: Sequence[Sequence[KVCacheBlock]]) -> None:
        """Drop a sequence's tables, one per group, as one chain: what one group lost is of no use to the others.

        The null block, which stands where a group has none, is passed over.
        """
        chain = [block for entries in zip(*tables, strict=True) for block in entries]
        self.free([block for block in chain if block.block_id != NULL_BLOCK_ID])

    def pin(self, block: KVCacheBlock) -> None:
        """Hold a block until the plan is sealed, because a planned move reads it."""
        self.touch([block])
        self._pinned.append(block)

    def unpin(self) -> None:
        """Let go of what was pinned."""
        if self._pinned:
            self.free(self._pinned)
            self._pinned = []

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], hashes: Sequence[BlockHash]) -> None:
        """Make full, computed blocks findable; content that another block holds already keeps that block.

        Blocks that can be found by these hashes already are fine.
        """
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert block.ref_cnt > 0, f"{block!r} is cached by nobody"
            assert block.block_hash in (None, block_hash), f"{block!r} is cached twice"
            block.is_full = True
            if block.block_hash is None and self._cached.setdefault(block_hash, block) is block:
                block.block_hash = block_hash
                if self._events is not None:
                    self._events.stored(block_hash, self._medium)

    def forget(self, block_hash: BlockHash) -> None:
        """Let nobody find this content again; who holds its block keeps it. Content that is not here is fine."""
        block = self._cached.get(block_hash)
        if block is None:
            return
        self._unname(block)
        if block.ref_cnt == 0:  # nothing to reuse, so it is given out before all others
            self.free_queue.remove(block)
            self.free_queue.prepend(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; refused (False) while any block is held."""
        if self.is_held:
            return False
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()
        if self._events is not None and self._medium == DEVICE:  # it stands for all media
            self._events.cleared()
        return True

    def _evict(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self._unname(block)

    def _unname(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None, f"{block!r} is not cached"
        del self._cached[block.block_hash]
        if self._events is not None:
            self._events.removed(block.block_hash, self._medium)
        block.block_hash = None
