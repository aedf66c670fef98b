"""Block tables: which cache blocks hold a row's tokens, for one KV cache group.

Invariant: `block_ids[row, :num_blocks[row]]` are blocks of the pool (times `parts_per_block`), or the parts of them
that are blocks to the kernels. They are checked when they come in, so that no kernel ever indexes with anything else.
The null block 0 stands only where the spec needs no block. What a request gave back while it runs stays in its row, and
is never read again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.errors import EngineError
from quire.kv_cache.spec import NULL_BLOCK_ID, KVCacheSpec, RecurrentStateSpec


class BlockTable:
    """One row of physical block ids per request, of blocks as the group's kernels know them.

    Args:
        max_num_rows: rows, one per running request.
        max_model_len: tokens of the longest request.
        spec: what the group's layers read.
        pool_size: blocks in the cache, the null block included.
        parts_per_block: as which multiple the group's layers know a block id of the pool.
    """

    def __init__(
        self,
        max_num_rows: int,
        max_model_len: int,
        spec: KVCacheSpec,
        pool_size: int,
        parts_per_block: int = 1,
    ) -> None:
        self.block_size = spec.kernel_block_size
        self.pool_size = pool_size
        self.has_states = isinstance(spec, RecurrentStateSpec)
        self._spec = spec
        self._parts_per_block = parts_per_block
        self._kernel_blocks = np.arange(spec.kernel_blocks) * spec.planes
        width = spec.num_blocks(max_model_len) * spec.kernel_blocks
        self.block_ids: NDArray[np.int32] = np.zeros((max_num_rows, width), dtype=np.int32)
        self.num_blocks: NDArray[np.int64] = np.zeros(max_num_rows, dtype=np.int64)

    def append(self, row: int, block_ids: list[int], num_computed_tokens: int) -> None:
        """Add blocks at the end of a row, whose request is to be computed from `num_computed_tokens` on.

        Raises:
            EngineError: a block id is not in the pool, is 0 where a block is read, or the row is full.
        """
        if not block_ids:
            return
        parts = len(self._kernel_blocks)
        start = int(self.num_blocks[row]) // parts
        end = start + len(block_ids)
        nulls = [index for index, block_id in enumerate(block_ids, start) if block_id == NULL_BLOCK_ID]
        missing = any(self._spec.needs_block(index, num_computed_tokens, end) for index in nulls)
        if min(block_ids) < 0 or max(block_ids) >= self.pool_size or missing:
            raise EngineError(
                f"block ids {block_ids} must be in [1, {self.pool_size}), or 0 where no block is needed"
            )
        if end * parts > self.block_ids.shape[1]:
            raise EngineError(
                f"a row of {end} blocks is longer than the limit of {self.block_ids.shape[1] // parts}"
            )
        firsts = np.array(block_ids)[:, None]
        ids = np.where(firsts == NULL_BLOCK_ID, 0, firsts * self._parts_per_block + self._kernel_blocks)
        self.block_ids[row, start * parts : end * parts] = ids.ravel()
        self.num_blocks[row] = end * parts

    def clear(self, row: int) -> None:
        """Forget a row's blocks."""
        self.num_blocks[row] = 0

    def capacity(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that each row's blocks can hold."""
        return self.num_blocks.take(rows) * self.block_size

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slot of each token: rows [T] and positions [T] -> block_id * block_size + offset, [T] int64."""
        blocks = self.block_ids[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def gather(self, rows: NDArray[np.int64], num_tokens: int) -> NDArray[np.int32]:
        """The tables of some rows, wide enough for `num_tokens` tokens: a new [R, blocks] int32."""
        width = -(-num_tokens // self.block_size)
        gathered: NDArray[np.int32] = self.block_ids[:, :width].take(rows, axis=0)
        return gathered
