# SPDX-License-Identifier: Apache-2.0
"""Managers of groups by the class of their spec, and those of recurrent states and of encoders."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_cache.block_pool import KVCacheBlock
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.single_type_manager import (
    FindBlock,
    FullAttentionManager,
    LocalAttentionManager,
    SingleTypeManager,
)
from quire.kv_cache.spec import (
    ChunkedLocalSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    KVCacheSpec,
    LatentAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)


class RecurrentStateManager(LocalAttentionManager):
    """Manager of recurrent states. Only the latest is read, so few entries have a block; see `RecurrentStateSpec`."""

    leaves_gaps = True
    _spec: RecurrentStateSpec

    def find_fork(self, request_id: str, num_tokens: int) -> list[KVCacheBlock] | None:
        """Return None in the middle of a block, whose state is replaced as its request proceeds."""
        return None if num_tokens % self.block_size else super().find_fork(request_id, num_tokens)

    def _num_new(self, start: int, end: int) -> int:
        return sum(self._spec.has_block(index, end) for index in range(start, end))

    def _new_blocks(self, start: int, end: int) -> list[KVCacheBlock]:
        blocks = iter(self._pool.get_new_blocks(self._num_new(start, end)))
        return [
            next(blocks) if self._spec.has_block(index, end) else self._null_block
            for index in range(start, end)
        ]


class EncoderOnlyManager(SingleTypeManager):
    """Manager that caches nothing: no request holds a block, and no prefix is found."""

    drops_blocks = False
    leaves_gaps = True

    def find_longest_cache_hit(
        self, hashes: Sequence[BlockHash], max_num_tokens: int, find: FindBlock
    ) -> list[KVCacheBlock]:
        return []

    def keys(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        return []

    def _num_new(self, start: int, end: int) -> int:
        return 0

    def _new_blocks(self, start: int, end: int) -> list[KVCacheBlock]:
        return [self._null_block] * max(end - start, 0)


MANAGERS: dict[type[KVCacheSpec], type[SingleTypeManager]] = {
    FullAttentionSpec: FullAttentionManager,
    LatentAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: LocalAttentionManager,
    ChunkedLocalSpec: LocalAttentionManager,
    RecurrentStateSpec: RecurrentStateManager,
    EncoderOnlySpec: EncoderOnlyManager,
}
