# SPDX-License-Identifier: Apache-2.0
"""Copies of whole cache blocks: within the cache, and to and from host memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit
def _copy(target, source, pairs, block_size, TILE: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = offset < block_size
    origin, destination = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    value = tl.load(source + origin * block_size + offset, mask=inside)
    tl.store(target + destination * block_size + offset, value, mask=inside)


def copy_blocks(target: Tensor, source: Tensor, pairs: Tensor) -> None:
    """target[pairs[i, 1]] = source[pairs[i, 0]] for all i: both [blocks, ...] contiguous, pairs [N, 2] int64.

    Source blocks are not among the targets. `source` or `target` may be pinned host memory that the device can address.
    """
    if len(pairs):
        block_size = target[0].numel()
        grid = (len(pairs), triton.cdiv(block_size, TILE))
        _copy[grid](target.view(-1), source.view(-1), pairs, block_size, TILE=TILE)
