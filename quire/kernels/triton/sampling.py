"""The choice of a token on a GPU, by the Gumbel-max trick.

The largest of ln(p) + g, with Gumbel noise g for every token, is token i with probability p[i] (E. Gumbel, "Statistical
theory of extreme values", 1954; C. Maddison et al., "A* sampling", 2014). No sum is needed, and a maximum is exact in
any order. So a row is split over as many programs as keep the device busy, and the token does not depend on how. A
greedy row is one without noise.

Of rows that use top-k or top-p, what may be kept is collected instead of raced, and races last: see `cut`.

Invariant: a row's token is a function of its own logits and settings, its seed and its position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.limits import ANY_LIMITS, Limits
from quire.kernels.triton import cut, launch
from quire.kernels.triton.cut import (
    GROUP,
    bounds,
    collect,
    find_cut,
    is_cut,
    keys_of,
    scaled,
    temperature_of,
    token_of,
    value_of,
)
from quire.kernels.triton.noise import gumbel, gumbel_at

TILE = 1024
MAX_SPLITS = 256
PROGRAMS_PER_PROCESSOR = 8
"""Of 4 warps each: enough loads in flight to keep the memory busy."""


@triton.jit(do_not_specialize=["tiles"])
def _survey(group_largest, logits, settings, n, num_groups, tiles, TILE: tl.constexpr):
    """The largest scaled logit of each group of tokens."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = temperature_of(settings + index * 4)
    GROUPS: tl.constexpr = TILE // GROUP
    for tile in range(tiles):
        first = (split * tiles + tile) * TILE
        value = scaled(logits + index * n, first + tl.arange(0, TILE), n, temperature)
        group = first // GROUP + tl.arange(0, GROUPS)
        largest = tl.max(tl.reshape(value, [GROUPS, GROUP]), 1)
        tl.store(group_largest + index * num_groups + group, largest, mask=group < num_groups)


@triton.jit
def _random_key(random_keys, index, NOISE: tl.constexpr):
    """The seed and the position of a row."""
    if NOISE:
        return tl.load(random_keys + index * 2), tl.load(random_keys + index * 2 + 1)
    else:
        return index, index


@triton.jit(do_not_specialize=["num_splits", "tiles"])
def _race(
    best_keys,
    ids,
    logits,
    settings,
    random_keys,
    group_largest,
    kept_keys,
    found,
    n,
    num_groups,
    num_splits,
    tiles,
    NOISE: tl.constexpr,
    LIMITED: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The first token of each split, by scaled logit plus noise; of a row that is cut, what may be kept."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, setting = logits + index * n, settings + index * 4
    temperature, is_random = temperature_of(setting), (tl.load(setting) != 0.0) & NOISE
    lowest = temperature * 0 + float("-inf")
    if LIMITED:
        largest, lowest, bound = bounds(group_largest, setting, index, n, num_groups, GROUPS)
        if is_cut(setting, n):
            first = split * tiles * TILE
            collect(
                kept_keys, found, row, setting, index, first, n, tiles, temperature, largest, lowest, bound,
                TILE, CAPACITY,
            )  # fmt: skip
            return
    seed, position = _random_key(random_keys, index, NOISE)
    best, chosen = tl.full([TILE], float("-inf"), tl.float64), tl.full([TILE], n, tl.int32)
    for tile in range(tiles):
        start = (split * tiles + tile) * TILE
        column = start + tl.arange(0, TILE)
        value = scaled(row, column, n, temperature)
        key = tl.where(value >= lowest, value, float("-inf")).to(tl.float64)
        if is_random:
            key += gumbel(seed, position, start, TILE).to(tl.float64)
        chosen = tl.where(key > best, column, chosen)
        best = tl.maximum(key, best)
    first = tl.max(best)
    place = index * num_splits + split
    tl.store(best_keys + place, first)
    tl.store(ids + place, tl.min(tl.where(best == first, chosen, n)))


@triton.jit
def _winner(key, token):
    """The token of the largest key, of equal ones the lowest id; -1 where all are impossible."""
    best = tl.max(key)
    chosen = tl.min(tl.where(key == best, token, 0x7FFFFFFF))
    return tl.where(best == float("-inf"), -1, chosen).to(tl.int64)


@triton.jit
def _first_kept(
    kept_keys, found, row, setting, group_largest, index, n, num_groups, seed, position,
    NOISE: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """In each lane, the largest scaled logit plus noise of the tokens above the cut, and its token."""
    largest, _, bound = bounds(group_largest, setting, index, n, num_groups, GROUPS)
    count, mass = tl.load(found + index * 2), tl.load(found + index * 2 + 1)
    temperature, is_random = temperature_of(setting), (tl.load(setting) != 0.0) & NOISE
    last = find_cut(
        kept_keys, row, setting, index, n, count, mass, temperature, largest, bound, TILE, CAPACITY
    )
    best, chosen = tl.full([TILE], float("-inf"), tl.float64), tl.full([TILE], n, tl.int32)
    for tile in range(tl.cdiv(tl.where(count <= CAPACITY, count, n), TILE)):
        kept = keys_of(tile, kept_keys, row, index, n, count, temperature, bound, TILE, CAPACITY)
        token = token_of(kept, n)
        key = tl.where(kept >= last, value_of(kept), float("-inf")).to(tl.float64)
        if is_random:
            key += gumbel_at(seed, position, token).to(tl.float64)
        is_first = (key > best) | ((key == best) & (token < chosen))
        chosen = tl.where(is_first, token, chosen)
        best = tl.maximum(key, best)
    return best, chosen


@triton.jit(do_not_specialize=["num_splits"])
def _finish(
    out,
    best_keys,
    ids,
    logits,
    settings,
    random_keys,
    group_largest,
    kept_keys,
    found,
    n,
    num_groups,
    num_splits,
    NOISE: tl.constexpr,
    LIMITED: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """The first of the splits' tokens; of a row that is cut, the first of those that are kept."""
    index, split = tl.program_id(0).to(tl.int64), tl.arange(0, MAX_SPLITS)
    row, setting = logits + index * n, settings + index * 4
    if LIMITED:  # noqa: SIM102  (decided when the kernel is compiled)
        if is_cut(setting, n):
            seed, position = _random_key(random_keys, index, NOISE)
            best, chosen = _first_kept(
                kept_keys, found, row, setting, group_largest, index, n, num_groups, seed, position,
                NOISE, TILE, GROUPS, CAPACITY,
            )  # fmt: skip
            tl.store(out + index, _winner(best, chosen))
            return
    place, inside = index * num_splits + split, split < num_splits
    key = tl.load(best_keys + place, mask=inside, other=float("-inf"))
    tl.store(out + index, _winner(key, tl.load(ids + place, mask=inside, other=0x7FFFFFFF)))


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
    (num_rows, vocab_size), device = logits.shape, logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return out
    splits, num_groups = _splits(num_rows, vocab_size, num_splits), triton.cdiv(vocab_size, GROUP.value)
    grid = (num_rows, splits.number)
    best = torch.empty(grid, dtype=torch.float64, device=device)
    ids = torch.empty(grid, dtype=torch.int32, device=device)
    group_largest = kept = found = out  # where nothing is limited, nobody looks
    if any(limits):
        group_largest = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
        kept = torch.empty(num_rows, cut.CAPACITY, dtype=torch.int64, device=device)
        found = torch.zeros(num_rows, 2, dtype=torch.int64, device=device)
        _survey[grid](group_largest, logits, settings, vocab_size, num_groups, splits.tiles, TILE=TILE)
    rows = (best, ids, logits, settings, out if keys is None else keys, group_largest, kept, found)
    variant = {
        "NOISE": keys is not None,
        "LIMITED": any(limits),
        "TILE": TILE,
        "GROUPS": launch.next_power_of_2(num_groups),
        "CAPACITY": cut.CAPACITY,
    }
    _race[grid](*rows, vocab_size, num_groups, *splits, **variant)
    _finish[(num_rows,)](out, *rows, vocab_size, num_groups, splits.number, **variant, MAX_SPLITS=MAX_SPLITS)
    return out
