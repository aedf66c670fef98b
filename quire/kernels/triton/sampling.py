"""The choice of a token on a GPU, by the Gumbel-max trick.

The largest of ln(p) + g, with Gumbel noise g for every token, is token i with probability p[i] (E. Gumbel, "Statistical
theory of extreme values", 1954; C. Maddison et al., "A* sampling", 2014). No sum is needed, and a maximum is exact in
any order. So a row is split over as many programs as keep the device busy, and the token does not depend on how. A
greedy row is one without noise.

Of rows that use top-k or top-p, tokens that are kept for sure race so, and those about which one must look closer are
collected and race last: see `cut`.

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
    BUCKETS,
    GROUP,
    find_cut,
    is_cut,
    keys_of,
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
from quire.kernels.triton.noise import gumbel, gumbel_at

TILE = 1024
KEY_TILE = 256
MAX_SPLITS = 256
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
PROGRAMS_PER_PROCESSOR = 8
"""Of 4 warps each: enough loads in flight to keep the memory busy."""


@triton.jit(do_not_specialize=["tiles"])
def _survey(
    group_largest, smallest, counts, masses, found, logits, settings, n, num_groups, tiles, TILE: tl.constexpr
):
    """The largest scaled logit of each group of tokens, and a split's least one that is possible; and what is to be
    counted begins at 0."""
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
    """A row's span and, if it is to be cut, how many tokens are in each bucket of it, and what mass they have."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, setting = logits + index * n, settings + index * 4
    span = store_span(
        spans + index * SPAN, group_largest + index * num_groups, smallest + index * num_splits, setting,
        n, num_groups, num_splits, split == 0, GROUPS, MAX_SPLITS,
    )  # fmt: skip
    if is_cut(setting, n):
        tally(
            counts + index * BUCKETS, masses + index * BUCKETS, found + index * 2, row, setting,
            split * tiles * TILE, n, tiles, temperature_of(setting), span, TILE,
        )  # fmt: skip


@triton.jit
def _random_key(random_keys, index, NOISE: tl.constexpr):
    """The seed and the position of a row."""
    if NOISE:
        return tl.load(random_keys + index * 2), tl.load(random_keys + index * 2 + 1)
    else:
        return index, index


@triton.jit
def _better(best, chosen, key, token):
    """Lane by lane the larger key and its token; of equal ones, the lower id."""
    is_better = (key > best) | ((key == best) & (token < chosen))
    return tl.maximum(best, key), tl.where(is_better, token, chosen)


@triton.jit
def _first_of(best, chosen):
    """The largest key of some lanes, and its token."""
    key = tl.max(best)
    return key, tl.min(tl.where(best == key, chosen, NO_TOKEN))


@triton.jit(do_not_specialize=["num_splits", "tiles"])
def _race(
    best_keys, ids, logits, settings, random_keys, spans, counts, masses, kept_keys, found, n, num_splits, tiles,
    NOISE: tl.constexpr, LIMITED: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The first token of each split, by scaled logit plus noise, among those that are kept for sure; others that may be
    are collected."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, setting = logits + index * n, settings + index * 4
    temperature, is_random = temperature_of(setting), (tl.load(setting) != 0.0) & NOISE
    lowest, cut = temperature * 0 + float("-inf"), is_random & False
    if LIMITED:
        span = load_span(spans + index * SPAN)
        lowest, cut = span[1], is_cut(setting, n)
        unsure = unsure_buckets(
            counts + index * BUCKETS, masses + index * BUCKETS, found + index * 2, setting, n
        )
    seed, position = _random_key(random_keys, index, NOISE)
    best, chosen = tl.full([TILE], float("-inf"), tl.float64), tl.full([TILE], NO_TOKEN, tl.int32)
    for tile in range(tiles):
        start = (split * tiles + tile) * TILE
        column = start + tl.arange(0, TILE)
        value = scaled(row, column, n, temperature)
        runs, is_empty = value >= lowest, cut & False
        if LIMITED:  # noqa: SIM102  (decided when the kernel is compiled)
            if cut:
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
    """In each lane, the largest scaled logit plus noise of the collected tokens that are kept, and its token."""
    temperature, is_random = temperature_of(setting), (tl.load(setting) != 0.0) & NOISE
    last = find_cut(setting, kept_keys, row, n, count, temperature, span, unsure, TILE, CAPACITY)
    best, chosen = tl.full([TILE], float("-inf"), tl.float64), tl.full([TILE], NO_TOKEN, tl.int32)
    for tile in range(num_tiles(count, n, TILE, CAPACITY)):
        kept = keys_of(tile, kept_keys, row, n, count, temperature, span, unsure, TILE, CAPACITY)
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
    """The first of the splits' tokens and of those that were collected and are kept; -1 where none is possible."""
    index, split = tl.program_id(0).to(tl.int64), tl.arange(0, MAX_SPLITS)
    row, setting = logits + index * n, settings + index * 4
    place, inside = index * num_splits + split, split < num_splits
    keys = tl.load(best_keys + place, mask=inside, other=float("-inf"))
    best, chosen = _first_of(keys, tl.load(ids + place, mask=inside, other=NO_TOKEN))
    if LIMITED:
        count = tl.load(found + index * 2)
        if is_cut(setting, n) & (count > 0):
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
    splits = _splits(num_rows, vocab_size, num_splits)
    grid = (num_rows, splits.number)
    best = torch.empty(grid, dtype=torch.float64, device=device)
    ids = torch.empty(grid, dtype=torch.int32, device=device)
    looked_at = _look(logits, settings, splits) if any(limits) else (out,) * 5  # which nobody reads
    rows = (best, ids, logits, settings, out if keys is None else keys, *looked_at)
    variant = {"NOISE": keys is not None, "LIMITED": any(limits), "CAPACITY": cut.CAPACITY, "SPAN": cut.SPAN}
    _race[grid](*rows, vocab_size, *splits, **variant, TILE=TILE)
    _finish[(num_rows,)](
        out, *rows, vocab_size, splits.number, **variant, TILE=KEY_TILE, MAX_SPLITS=MAX_SPLITS
    )
    return out


def _look(logits: Tensor, settings: Tensor, splits: _Splits) -> tuple[Tensor, ...]:
    """What a cut is made by: spans, counts and masses of buckets, room for keys, and what was found."""
    (num_rows, vocab_size), num_groups = logits.shape, triton.cdiv(logits.shape[1], GROUP.value)

    def of_rows(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, columns, dtype=dtype, device=logits.device)

    group_largest, smallest = of_rows(num_groups, torch.float32), of_rows(splits.number, torch.float32)
    spans, counts = of_rows(cut.SPAN, torch.float32), of_rows(BUCKETS.value, torch.int32)
    masses, found = of_rows(BUCKETS.value, torch.int64), of_rows(2, torch.int64)
    grid = (num_rows, splits.number)
    _survey[grid](
        group_largest, smallest, counts, masses, found, logits, settings, vocab_size, num_groups, splits.tiles,
        TILE=TILE,
    )  # fmt: skip
    _tally[grid](
        spans, counts, masses, found, group_largest, smallest, logits, settings, vocab_size, num_groups, *splits,
        TILE=TILE, GROUPS=launch.next_power_of_2(num_groups), MAX_SPLITS=MAX_SPLITS, SPAN=cut.SPAN,
    )  # fmt: skip
    return spans, counts, masses, of_rows(cut.CAPACITY, torch.int64), found
