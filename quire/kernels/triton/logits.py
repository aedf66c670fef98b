"""What happens to logits before a token is chosen: broken rows are found and cleared, tokens are forbidden.

Invariant: rows are split over programs, and no result depends on how.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192


@triton.jit
def _unusable(out, logits, n, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    wrong = tl.zeros([TILE], tl.int1)
    for start in range(0, n, TILE):
        column = start + tl.arange(0, TILE)
        value = tl.load(logits + row * n + column, mask=column < n, other=float("-inf"))
        wrong = wrong | (value != value)
        largest = tl.maximum(largest, value)
    highest = tl.max(largest)
    is_wrong = (tl.max(wrong.to(tl.int32)) > 0) | (highest == float("inf")) | (highest == float("-inf"))
    tl.store(out + row, is_wrong)


@triton.jit
def _clear(logits, cleared, n, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(cleared + row):
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        tl.store(logits + row * n + column, 0.0, mask=column < n)


@triton.jit
def _mask(logits, rows, words, n, num_words, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < n
    word = tl.load(words + place * num_words + column // 32, mask=inside, other=-1)
    is_forbidden = ((word >> (column % 32)) & 1) == 0
    row = tl.load(rows + place)
    tl.store(logits + row * n + column, float("-inf"), mask=inside & is_forbidden)


def unusable_rows(logits: Tensor) -> Tensor:
    """See `ops.unusable_rows`."""
    num_rows, n = logits.shape
    out = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        _unusable[(num_rows,)](out, logits, n, TILE=TILE, num_warps=8)
    return out


def clear_rows(logits: Tensor, cleared: Tensor) -> None:
    """See `ops.clear_rows`."""
    num_rows, n = logits.shape
    if num_rows:
        _clear[(num_rows, triton.cdiv(n, 2 * TILE))](logits, cleared, n, TILE=2 * TILE, num_warps=8)


def mask_logits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See `ops.mask_logits`."""
    n = logits.shape[1]
    if len(rows):
        grid = (len(rows), triton.cdiv(n, TILE))
        _mask[grid](logits, rows, words, n, words.shape[1], TILE=TILE, num_warps=8)
