"""What happens to logits before a token is chosen: broken rows are found and cleared, tokens are forbidden.

Invariant: rows are split over programs, and no result depends on how.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import next_power_of_2

TILE = 8192


@triton.jit
def _look(largest, logits, n, TILE: tl.constexpr):
    """The largest logit of each tile of a row: +inf if one is no number."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    value = tl.load(logits + row * n + column, mask=column < n, other=float("-inf"))
    value = tl.where(value != value, float("inf"), value)
    tl.store(largest + row * tl.num_programs(1) + tile, tl.max(value))


@triton.jit
def _judge(out, largest, num_tiles, TILES: tl.constexpr):
    """Whether a row has a logit that is no number or +inf, or none but -inf."""
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    highest = tl.max(tl.load(largest + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf")))
    tl.store(out + row, (highest == float("inf")) | (highest == float("-inf")))


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
        num_tiles = triton.cdiv(n, TILE)
        largest = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
        _look[(num_rows, num_tiles)](largest, logits, n, TILE=TILE, num_warps=8)
        _judge[(num_rows,)](out, largest, num_tiles, TILES=next_power_of_2(num_tiles), num_warps=1)
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
