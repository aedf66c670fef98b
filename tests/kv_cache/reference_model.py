# SPDX-License-Identifier: Apache-2.0
"""Reference model of the KV cache: dictionaries of blocks whose content is written out, token by token.

A block holds `Content`: the group it serves, the salt and all tokens up to its last written slot. So whatever is read
can be compared with the tokens of whoever reads it, and nothing here depends on hashes, queues or reference counts.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.hashing import BlockHash, ExtraKeys
from quire.kv_cache.manager import PlannedMoves
from quire.kv_cache.spec import KVCacheSpec, RecurrentStateSpec


class Content(NamedTuple):
    group: int
    salt: str | None
    tokens: tuple[int, ...]


@dataclass
class Tokens:
    """A request, as far as the cache is concerned."""

    request_id: str
    token_ids: list[int]
    salt: str | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_swapped_tokens: int = 0
    num_in_flight: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)

    @property
    def extra_keys(self) -> ExtraKeys:
        return ExtraKeys(cache_salt=self.salt)

    def content(self, group: int, num_tokens: int) -> Content:
        return Content(group, self.salt, tuple(self.token_ids[:num_tokens]))


class Memory:
    """Both tiers, changed by what plans say."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self._specs = specs

    def move(self, moves: PlannedMoves) -> None:
        """All swap-outs, then all swap-ins, then all copies; each reads before any of its kind writes."""
        self.host |= {target: self.device[source] for source, target in moves.swap_outs}
        self.device |= {target: self.host[source] for source, target in moves.swap_ins}
        self.device |= {target: self.device[source] for source, target in moves.block_copies}

    def compute(self, seq: Tokens, tables: Sequence[Sequence[int]], start: int, end: int) -> None:
        """Read what the tokens `start` to `end` (exclusive) read of those before, and write what they leave."""
        for group, (spec, table) in enumerate(zip(self._specs, tables, strict=True)):
            if isinstance(spec, RecurrentStateSpec):
                self._advance_state(seq, group, spec.block_size, table, start, end)
            else:
                self._attend(seq, group, spec, table, start, end)

    def _attend(
        self, seq: Tokens, group: int, spec: KVCacheSpec, table: Sequence[int], start: int, end: int
    ) -> None:
        size = spec.block_size
        for index in range(spec.first_block(start), spec.num_blocks(start)):
            found, wanted = self.device[table[index]], seq.content(group, min((index + 1) * size, start))
            assert found[:2] == wanted[:2]
            assert found.tokens[: len(wanted.tokens)] == wanted.tokens, "foreign or stale tokens are read"
        for index in range(start // size, spec.num_blocks(end)):
            assert table[index] != 0, "a token has no slot"
            self.device[table[index]] = seq.content(group, min((index + 1) * size, end))

    def _advance_state(
        self, seq: Tokens, group: int, size: int, table: Sequence[int], start: int, end: int
    ) -> None:
        if start:
            assert self.device[table[(start - 1) // size]] == seq.content(group, start), (
                "another state is read"
            )
        last = (end - 1) // size
        assert table[last] != 0, "a state has no block"
        for index in range(start // size, last + 1):
            if table[index] != 0:
                self.device[table[index]] = seq.content(group, min((index + 1) * size, end))


class PrefixNames:
    """Contents that each block hash stands for, learned from the sequences themselves."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self._specs = specs
        self._contents: dict[bytes, Content] = {}

    def learn(self, seq: Tokens) -> None:
        for group, spec in enumerate(self._specs):
            for index, name in enumerate(seq.block_hashes):
                content = seq.content(group, (index + 1) * spec.block_size)
                key = name + group.to_bytes(4, "big")
                known = self._contents.setdefault(key, content)
                assert known == content, "two contents have one name"

    def check(self, pool: BlockPool, tier: dict[int, Content]) -> None:
        """Every block that can be found holds what its name says."""
        for key, block in pool.cached_blocks.items():
            assert tier[block.block_id] == self._contents[key]

    def longest_hit(self, seq: Tokens, pools: Sequence[BlockPool]) -> int:
        """Tokens of the longest prefix of which every group has all that the next token reads, on some tier."""
        found = {self._contents[key] for pool in pools for key in pool.cached_blocks}
        size = self._specs[0].block_size
        for end in range((len(seq.token_ids) - 1) // size, 0, -1):
            needed = [
                seq.content(group, (index + 1) * size)
                for group, spec in enumerate(self._specs)
                for index in range(spec.first_block(end * size), end)
            ]
            if found.issuperset(needed):
                return end * size
        return 0


class EvictionOrder:
    """Watches one tier: what can be reused goes in the order in which it was last held, the tail of a chain first."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._now = 0
        self._released: dict[int, tuple[int, int]] = {}  # block -> time, and minus its place in the sequence
        self._before = self._snapshot()

    def _snapshot(self) -> dict[int, tuple[bool, bytes | None]]:
        """Block -> whether it is free, and its name."""
        return {b.block_id: (b.ref_cnt == 0, b.block_hash) for b in self._pool.blocks[1:]}

    def observe(
        self, places: dict[int, int], refreshed: Set[bytes], forgotten: Set[bytes] = frozenset()
    ) -> None:
        """Something was done to the pool.

        Args:
            places: positions, in their sequence, of blocks that were given back together as one chain.
            refreshed: names that count as used just now, though their blocks were not held.
            forgotten: names that were taken away, whoever's turn it was.
        """
        self._now += 1
        before, after = self._before, self._snapshot()
        before = {b: (is_free, None if name in forgotten else name) for b, (is_free, name) in before.items()}
        cached = [block for block, (is_free, name) in before.items() if is_free and name is not None]
        evicted = [block for block in cached if after[block][1] != before[block][1]]
        lost = [self._released[block] for block in evicted]
        for block, (is_free, name) in after.items():
            if is_free and (not before[block][0] or name in refreshed):
                self._released[block] = (self._now, -places.get(block, 0))
        kept = [self._released[block] for block in cached if after[block] == before[block]]
        if lost and kept:
            assert max(lost) <= min(kept), "evicted out of order"
        idle = [block for block, state in before.items() if state == after[block] == (True, None)]
        assert not (evicted and idle), "content was evicted while empty blocks were free"
        self._before = after
