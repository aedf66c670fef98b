"""The choice of a token on a GPU, by the Gumbel-max trick.

The largest of ln(p) + g, with Gumbel noise g for every token, is token i with probability p[i] (E. Gumbel, "Statistical
theory of extreme values", 1954; C. Maddison et al., "A* sampling", 2014). No sum is needed, and a maximum is exact in
any order. So a row is split over as many programs as keep the device busy, and the token does not depend on how. A
greedy row is one without noise.

Invariant: a row's token is a function of its own logits and settings, its seed and its position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.limits import ANY_LIMITS, Limits
from quire.kernels.triton import launch
from quire.kernels.triton.cut import (
    FIRST_BIT,
    Search,
    is_cut,
    largest_of,
    scaled,
    search,
    temperature_of,
    ties_kept,
)
from quire.kernels.triton.noise import gumbel
from quire.kernels.triton.token_order import ordered_bits

TILE = 1024
MAX_SPLITS = 256
PROGRAMS_PER_PROCESSOR = 8
"""Of 4 warps each: enough loads in flight to keep the memory busy."""


@triton.jit
def _kept_ties(ties, index, split, num_splits, kept, MAX_SPLITS: tl.constexpr):
    """Of the ties that are kept, those that earlier splits leave."""
    other = tl.arange(0, MAX_SPLITS)
    earlier = tl.load(ties + index * num_splits + other, mask=other < split, other=0)
    return kept - tl.sum(earlier)


@triton.jit(do_not_specialize=["num_splits", "tiles"])
def _race(
    best_keys,
    ids,
    logits,
    settings,
    random_keys,
    largest_keys,
    state,
    sums,
    ties,
    n,
    num_splits,
    tiles,
    NOISE: tl.constexpr,
    LIMITED: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """The first token of each split: by scaled logit plus noise, among those that the limits keep."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, setting = logits + index * n, settings + index * 4
    temperature, is_random = temperature_of(setting), (tl.load(setting) != 0.0) & NOISE
    seed, position = index, index
    if NOISE:
        seed, position = tl.load(random_keys + index * 2), tl.load(random_keys + index * 2 + 1)
    lowest, threshold, left = temperature * 0 + float("-inf"), index * 0, index * 0
    if LIMITED:
        lowest = largest_of(largest_keys, index, num_splits, MAX_SPLITS) + tl.load(setting + 1).to(tl.float32)
        if is_cut(setting, n):
            threshold = tl.load(state + index * 2)
            kept, _, _ = ties_kept(state, sums, setting, index)
            left = _kept_ties(ties, index, split, num_splits, kept, MAX_SPLITS)
    threshold = (threshold - FIRST_BIT).to(tl.int32)
    best, chosen = tl.full([TILE], float("-inf"), tl.float64), tl.full([TILE], n, tl.int32)
    for tile in range(tiles):
        start = (split * tiles + tile) * TILE
        column = start + tl.arange(0, TILE)
        value = scaled(row, column, n, temperature)
        if LIMITED:
            bits = ordered_bits(value)
            tied = (bits == threshold).to(tl.int32)
            kept = (value >= lowest) & ((bits > threshold) | ((tied == 1) & (tl.cumsum(tied) <= left)))
            left -= tl.sum(tied)
            value = tl.where(kept, value, float("-inf"))
        key = value.to(tl.float64)
        if is_random:
            key += gumbel(seed, position, start, TILE).to(tl.float64)
        chosen = tl.where(key > best, column, chosen)
        best = tl.maximum(key, best)
    first = tl.max(best)
    place = index * num_splits + split
    tl.store(best_keys + place, first)
    tl.store(ids + place, tl.min(tl.where(best == first, chosen, n)))


@triton.jit(do_not_specialize=["num_splits"])
def _finish(out, keys, ids, num_splits, MAX_SPLITS: tl.constexpr):
    """The first of the splits' tokens; -1 where all are impossible."""
    index, split = tl.program_id(0).to(tl.int64), tl.arange(0, MAX_SPLITS)
    place, inside = index * num_splits + split, split < num_splits
    key = tl.load(keys + place, mask=inside, other=float("-inf"))
    best = tl.max(key)
    chosen = tl.load(ids + place, mask=inside & (key == best), other=0x7FFFFFFF)
    tl.store(out + index, tl.where(best == float("-inf"), -1, tl.min(chosen)).to(tl.int64))


class _Splits(NamedTuple):
    """How rows are cut into splits."""

    number: int
    tiles: int
    """Of each."""


def _splits(num_rows: int, vocab_size: int, wanted: int) -> _Splits:
    """About `wanted` for each row, as many as there are tiles at most."""
    num_tiles = triton.cdiv(vocab_size, TILE)
    tiles = triton.cdiv(num_tiles, max(min(wanted, num_tiles, MAX_SPLITS), 1))
    return _Splits(triton.cdiv(num_tiles, tiles), tiles)


def sample_tokens(
    logits: Tensor, settings: Tensor, keys: Tensor | None, limits: Limits = ANY_LIMITS
) -> Tensor:
    """See `ops.sample_tokens`."""
    programs = PROGRAMS_PER_PROCESSOR * launch.num_processors(logits.device)
    return sample_in_splits(logits, settings, keys, limits, triton.cdiv(programs, max(len(logits), 1)))


def sample_in_splits(
    logits: Tensor, settings: Tensor, keys: Tensor | None, limits: Limits, num_splits: int
) -> Tensor:
    """`sample_tokens` with each row in about so many splits, which changes no token."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    splits = _splits(num_rows, vocab_size, num_splits)
    grid, sizes = (num_rows, splits.number), {"TILE": TILE, "MAX_SPLITS": MAX_SPLITS}
    largest, best = torch.empty(2, *grid, dtype=torch.float64, device=logits.device)
    ids = torch.empty(grid, dtype=torch.int32, device=logits.device)
    # Arguments that the variants of the kernel do not look at are `out`.
    rows, found = (logits, settings, out if keys is None else keys), Search(out, out, out)
    if any(limits):
        _race[grid](
            largest, ids, *rows, largest, *found, vocab_size, *splits, NOISE=False, LIMITED=False, **sizes
        )
    if limits.top_k or limits.top_p:
        found = search(logits, settings, largest, splits.tiles * TILE, MAX_SPLITS, limits)
    _race[grid](
        best, ids, *rows, largest, *found, vocab_size, *splits,
        NOISE=keys is not None, LIMITED=any(limits), **sizes,
    )  # fmt: skip
    _finish[(num_rows,)](out, best, ids, splits.number, MAX_SPLITS=MAX_SPLITS)
    return out
