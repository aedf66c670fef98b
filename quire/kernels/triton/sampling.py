# SPDX-License-Identifier: Apache-2.0
"""Sampling on a GPU, by the Gumbel-max trick.

The largest of ln(p) + g, with Gumbel noise g for every token, is token i with probability p[i] (E. Gumbel, "Statistical
theory of extreme values", 1954; C. Maddison et al., "A* sampling", 2014). No sum is needed, and a maximum is exact in
any order. So a row is split over as many programs as keep the device busy, without effect on the token. A greedy row
has
no noise. In rows with top-k or top-p, tokens that are certainly kept compete this way, and uncertain ones are collected
and compete last: see `primitives`.

Noise is generated where it is used. A Gumbel number is -ln(E), with E = -ln(1 - v) exponential and v uniform. Winning
tokens have large noise, so small v, which therefore must be precise: 64 random bits make a float32 of full precision
down to 2**-65. A token with 2**-64 of the mass still has its chance, where 24 bits would end at 2**-24. Random bits:
Philox4x32-10 of J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); one call of counter (position,
pair) serves the two tokens of a pair.

Invariant: a row's token is a function of its own logits and settings, its seed and its position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_metadata import ANY_LIMITS, SamplingLimits
from quire.kernels.triton import launch, primitives
from quire.kernels.triton.primitives import (
    BUCKETS,
    GROUP,
    candidate_keys,
    find_cutoff,
    is_limited,
    load_span,
    num_tiles,
    parted,
    scaled,
    store_span,
    tally,
    temperature_of,
    token_of,
    unsure_buckets,
    value_of,
)

BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def fraction_of(high, low):
    """Convert 64 bits to a float32 in (0, 1), excluding both ends, so that all further values are finite."""
    fraction = high.to(tl.float32) * 2.0**-32 + (low.to(tl.float32) + 0.5) * 2.0**-64
    return tl.minimum(fraction, BELOW_ONE)


@triton.jit
def _words(seed, position, pair):
    """Return the random bits of pairs of tokens: two words per token."""
    pair = pair.to(tl.uint32)
    zero = pair * 0
    low, high = (
        (position.to(tl.uint64) & 0xFFFFFFFF).to(tl.uint32),
        (position.to(tl.uint64) >> 32).to(tl.uint32),
    )
    return tl.philox(seed, zero + low, zero + high, pair, zero)


@triton.jit
def fractions(seed, position, first, TILE: tl.constexpr):
    """Return v of the tokens from `first`, an even number, on: [TILE] float32. See `philox.fractions`."""
    a, b, c, d = _words(seed, position, first // 2 + tl.arange(0, TILE // 2))
    return tl.interleave(fraction_of(a, b), fraction_of(c, d))


@triton.jit
def fractions_at(seed, position, token):
    """Return v of any tokens, as from `fractions`."""
    a, b, c, d = _words(seed, position, token // 2)
    return tl.where(token % 2 == 0, fraction_of(a, b), fraction_of(c, d))


@triton.jit
def gumbel_of(v):
    """Return -ln(-ln(1 - v))."""
    # Near 0 the logarithm of 1 - v would lose v's precision; the series has an error of v**5 / 5 there.
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return -tl.log(tl.where(v < 0.015625, series, -tl.log(1.0 - v)))


@triton.jit
def gumbel(seed, position, first, TILE: tl.constexpr):
    """Return noise of the tokens from `first`, an even number, on: [TILE] float32 between -2.9 and 45.1."""
    return gumbel_of(fractions(seed, position, first, TILE))


@triton.jit
def gumbel_at(seed, position, token):
    """Return noise of any tokens."""
    return gumbel_of(fractions_at(seed, position, token))


TILE = 1024
KEY_TILE = 256
MAX_SPLITS = 256
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
PROGRAMS_PER_PROCESSOR = 8
"""Programs of 4 warps each: enough loads in flight to saturate the memory."""


@triton.jit(do_not_specialize=["tiles"])
def _survey(
    group_largest, smallest, counts, masses, found, logits, settings, n, num_groups, tiles, TILE: tl.constexpr
):
    """Write the largest scaled logit of each group of tokens, and a split's least possible one; reset the counters."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = temperature_of(settings + index * 4)
    GROUPS: tl.constexpr = TILE // GROUP
    least = tl.full([TILE], float("inf"), tl.float32)
    for tile in range(tiles):
        first = (split * tiles + tile) * TILE
        value = scaled(logits + index * n, first + tl.arange(0, TILE), n, temperature)
        least = tl.minimum(least, tl.where(value > float("-inf"), value, float("inf")))
        group = first // GROUP + tl.arange(0, GROUPS)
        largest = tl.max(tl.reshape(value, [GROUPS, GROUP]), 1)
        tl.store(group_largest + index * num_groups + group, largest, mask=group < num_groups)
    tl.store(smallest + index * tl.num_programs(1) + split, tl.min(least))
    if split == 0:
        bucket, pair = index * BUCKETS + tl.arange(0, BUCKETS), index * 2 + tl.arange(0, 2)
        tl.store(counts + bucket, tl.zeros([BUCKETS], tl.int32))
        tl.store(masses + bucket, tl.zeros([BUCKETS], tl.int64))
        tl.store(found + pair, tl.zeros([2], tl.int64))


@triton.jit(do_not_specialize=["num_splits", "tiles"])
def _tally(
    spans, counts, masses, found, group_largest, smallest, logits, settings, n, num_groups, num_splits, tiles,
    TILE: tl.constexpr, GROUPS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Compute a row's span and, if it uses top-k or top-p, the count and mass of each bucket."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, setting = logits + index * n, settings + index * 4
    span = store_span(
        spans + index * SPAN, group_largest + index * num_groups, smallest + index * num_splits, setting,
        n, num_groups, num_splits, split == 0, GROUPS, MAX_SPLITS,
    )  # fmt: skip
    if is_limited(setting, n):
        tally(
            counts + index * BUCKETS, masses + index * BUCKETS, found + index * 2, row, setting,
            split * tiles * TILE, n, tiles, temperature_of(setting), span, TILE,
        )  # fmt: skip


@triton.jit
def _random_key(random_keys, index, NOISE: tl.constexpr):
    """Return the seed and the position of a row."""
    if NOISE:
        return tl.load(random_keys + index * 2), tl.load(random_keys + index * 2 + 1)
    else:
        return index, index


@triton.jit
def _better(best, chosen, key, token):
    """Return lane by lane the larger key and its token; ties by lower id."""
    is_better = (key > best) | ((key == best) & (token < chosen))
    return tl.maximum(best, key), tl.where(is_better, token, chosen)


@triton.jit
def _first_of(best, chosen):
    """Return the largest key of some lanes, and its token."""
    key = tl.max(best)
    return key, tl.min(tl.where(best == key, chosen, NO_TOKEN))


@triton.jit(do_not_specialize=["num_splits", "tiles"])
def _race(
    best_keys, ids, logits, settings, random_keys, spans, counts, masses, kept_keys, found, n, num_splits, tiles,
    NOISE: tl.constexpr, LIMITED: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write the first token of each split, by scaled logit plus noise, among certainly kept ones; collect uncertain
    ones.
    """
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, setting = logits + index * n, settings + index * 4
    temperature, is_random = temperature_of(setting), (tl.load(setting) != 0.0) & NOISE
    lowest, limited = temperature * 0 + float("-inf"), is_random & False
    if LIMITED:
        span = load_span(spans + index * SPAN)
        lowest, limited = span[1], is_limited(setting, n)
        unsure = unsure_buckets(
            counts + index * BUCKETS, masses + index * BUCKETS, found + index * 2, setting, n
        )
    seed, position = _random_key(random_keys, index, NOISE)
    best, chosen = tl.full([TILE], float("-inf"), tl.float64), tl.full([TILE], NO_TOKEN, tl.int32)
    for tile in range(tiles):
        start = (split * tiles + tile) * TILE
        column = start + tl.arange(0, TILE)
        value = scaled(row, column, n, temperature)
        runs, is_empty = value >= lowest, limited & False
        if LIMITED:  # noqa: SIM102  (decided when the kernel is compiled)
            if limited:
                runs = parted(
                    value, column, n, kept_keys + index * CAPACITY, found + index * 2, span, unsure, CAPACITY
                )
                is_empty = tl.max(runs.to(tl.int32)) == 0
        if not is_empty:
            key = tl.where(runs, value, float("-inf")).to(tl.float64)
            if is_random:
                key += gumbel(seed, position, start, TILE).to(tl.float64)
            best, chosen = _better(best, chosen, key, column)
    key, token = _first_of(best, chosen)
    place = index * num_splits + split
    tl.store(best_keys + place, key)
    tl.store(ids + place, token)


@triton.jit
def _first_unsure(
    row, setting, span, unsure, kept_keys, count, n, seed, position,
    NOISE: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Return in each lane the largest scaled logit plus noise of the collected tokens that are kept, and its token."""
    temperature, is_random = temperature_of(setting), (tl.load(setting) != 0.0) & NOISE
    last = find_cutoff(setting, kept_keys, row, n, count, temperature, span, unsure, TILE, CAPACITY)
    best, chosen = tl.full([TILE], float("-inf"), tl.float64), tl.full([TILE], NO_TOKEN, tl.int32)
    for tile in range(num_tiles(count, n, TILE, CAPACITY)):
        kept = candidate_keys(tile, kept_keys, row, n, count, temperature, span, unsure, TILE, CAPACITY)
        token = token_of(kept, n)
        key = tl.where(kept >= last, value_of(kept), float("-inf")).to(tl.float64)
        if is_random:
            key += gumbel_at(seed, position, token).to(tl.float64)
        best, chosen = _better(best, chosen, key, token)
    return best, chosen


@triton.jit(do_not_specialize=["num_splits"])
def _finish(
    out, best_keys, ids, logits, settings, random_keys, spans, counts, masses, kept_keys, found, n, num_splits,
    NOISE: tl.constexpr, LIMITED: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr, SPAN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Write the best of the splits' tokens and the kept collected ones; -1 if none is possible."""
    index, split = tl.program_id(0).to(tl.int64), tl.arange(0, MAX_SPLITS)
    row, setting = logits + index * n, settings + index * 4
    place, inside = index * num_splits + split, split < num_splits
    keys = tl.load(best_keys + place, mask=inside, other=float("-inf"))
    best, chosen = _first_of(keys, tl.load(ids + place, mask=inside, other=NO_TOKEN))
    if LIMITED:
        count = tl.load(found + index * 2)
        if is_limited(setting, n) & (count > 0):
            seed, position = _random_key(random_keys, index, NOISE)
            span = load_span(spans + index * SPAN)
            unsure = unsure_buckets(
                counts + index * BUCKETS, masses + index * BUCKETS, found + index * 2, setting, n
            )
            lanes, tokens = _first_unsure(
                row, setting, span, unsure, kept_keys + index * CAPACITY, count, n, seed, position,
                NOISE, TILE, CAPACITY,
            )  # fmt: skip
            key, token = _first_of(lanes, tokens)
            best, chosen = _better(best, chosen, key, token)
    tl.store(out + index, tl.where(best == float("-inf"), -1, chosen).to(tl.int64))


class _Splits(NamedTuple):
    """Partition of rows into splits."""

    number: int
    tiles: int
    """Tiles per split."""


def _splits(num_rows: int, vocab_size: int, wanted: int) -> _Splits:
    """Return about `wanted` splits per row, at most one per tile."""
    num_tiles = triton.cdiv(vocab_size, TILE)
    tiles = triton.cdiv(num_tiles, max(min(wanted, num_tiles, MAX_SPLITS), 1))
    return _Splits(triton.cdiv(num_tiles, tiles), tiles)


def sample_tokens(
    logits: Tensor, settings: Tensor, keys: Tensor | None, limits: SamplingLimits = ANY_LIMITS
) -> Tensor:
    """See `ops.sample_tokens`."""
    programs = PROGRAMS_PER_PROCESSOR * launch.num_processors(logits.device)
    return sample_in_splits(logits, settings, keys, limits, triton.cdiv(programs, max(len(logits), 1)))


def sample_in_splits(
    logits: Tensor, settings: Tensor, keys: Tensor | None, limits: SamplingLimits, num_splits: int
) -> Tensor:
    """Return `sample_tokens` with each row in about that many splits, which has no effect on the tokens."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return out
    splits = _splits(num_rows, vocab_size, num_splits)
    grid = (num_rows, splits.number)
    best = torch.empty(grid, dtype=torch.float64, device=device)
    ids = torch.empty(grid, dtype=torch.int32, device=device)
    buckets = (
        _bucket_rows(logits, settings, splits) if any(limits) else (out,) * 5
    )  # placeholders that are never read
    rows = (best, ids, logits, settings, out if keys is None else keys, *buckets)
    variant = {
        "NOISE": keys is not None,
        "LIMITED": any(limits),
        "CAPACITY": primitives.CAPACITY,
        "SPAN": primitives.SPAN,
    }
    _race[grid](*rows, vocab_size, *splits, **variant, TILE=TILE)
    _finish[(num_rows,)](
        out, *rows, vocab_size, splits.number, **variant, TILE=KEY_TILE, MAX_SPLITS=MAX_SPLITS
    )
    return out


def _bucket_rows(logits: Tensor, settings: Tensor, splits: _Splits) -> tuple[Tensor, ...]:
    """Compute the inputs of the cut-off: spans, counts and masses of buckets, memory for keys, and counters."""
    (num_rows, vocab_size), num_groups = logits.shape, triton.cdiv(logits.shape[1], GROUP.value)

    def of_rows(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, columns, dtype=dtype, device=logits.device)

    group_largest, smallest = of_rows(num_groups, torch.float32), of_rows(splits.number, torch.float32)
    spans, counts = of_rows(primitives.SPAN, torch.float32), of_rows(BUCKETS.value, torch.int32)
    masses, found = of_rows(BUCKETS.value, torch.int64), of_rows(2, torch.int64)
    grid = (num_rows, splits.number)
    _survey[grid](
        group_largest, smallest, counts, masses, found, logits, settings, vocab_size, num_groups, splits.tiles,
        TILE=TILE,
    )  # fmt: skip
    _tally[grid](
        spans, counts, masses, found, group_largest, smallest, logits, settings, vocab_size, num_groups, *splits,
        TILE=TILE, GROUPS=launch.next_power_of_2(num_groups), MAX_SPLITS=MAX_SPLITS, SPAN=primitives.SPAN,
    )  # fmt: skip
    return spans, counts, masses, of_rows(primitives.CAPACITY, torch.int64), found
