"""Where top-k and top-p end: the last logit of the prefix of the order of tokens that they keep.

Found by radix selection on the bits of the scaled logits, most significant first, instead of by sorting (A. Alabi et
al., "Fast k-selection algorithms for graphics processing units", 2012). A pass counts what stands at or above 16
thresholds; the next one takes the last of them at which enough is kept, and refines it. The last pass of a search
counts at the threshold itself, where equal logits may be kept in part, and just above it.

Invariant: masses are integers, in steps of 2**-40 of the first token's, as counts are; their sums are exact, so any
number of programs may add them up in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.limits import Limits
from quire.kernels.triton.token_order import MAX_LOGIT, ordered_bits

WIDTH = tl.constexpr(16)
"""Thresholds of a pass: it finds four bits."""
FIRST_BIT = tl.constexpr(2**31)
"""Between ordered bits, which are signed, and thresholds, which count from 0."""
UNIT = tl.constexpr(float(2**40))
NEVER = tl.constexpr(2**62)
"""A mass that no sum reaches."""
_SHIFTS = (28, 24, 20, 16, 12, 8, 4, 0)
_TILE = 256


class Search(NamedTuple):
    """The last pass of what was searched, for N rows in S splits."""

    state: Tensor
    """[N, 2] int64: the threshold, and the mass at which top-p has enough."""
    sums: Tensor
    """[N, 2, WIDTH] int64: counts, then masses, at or above the threshold (first) and above it (second)."""
    ties: Tensor
    """[N, S] int64: tokens of each split at the threshold."""


@triton.jit
def scaled(row, column, n, temperature):
    """Logits of a tile divided by the temperature; -inf outside the row."""
    value = tl.load(row + column, mask=column < n, other=float("-inf"))
    return tl.minimum(value / temperature, MAX_LOGIT)


@triton.jit
def temperature_of(setting):
    """What logits are divided by: 1 for greedy rows."""
    asked = tl.load(setting).to(tl.float32)
    return tl.where(asked == 0.0, 1.0, asked)


@triton.jit
def largest_of(keys, index, num_splits, MAX_SPLITS: tl.constexpr):
    """A row's largest scaled logit, of those that its splits found."""
    split = tl.arange(0, MAX_SPLITS)
    key = tl.load(keys + index * num_splits + split, mask=split < num_splits, other=float("-inf"))
    return tl.max(key).to(tl.float32)


@triton.jit
def is_cut(setting, n):
    """Whether a row uses top-k or top-p."""
    return (tl.load(setting + 2) < n) | (tl.load(setting + 3) < 1.0)


@triton.jit
def ties_kept(state, sums, setting, index):
    """How many tokens at the threshold are kept, the mass above it, and the weight of each at it."""
    lane, place = tl.arange(0, WIDTH), sums + index * 2 * WIDTH
    counts, masses = tl.load(place + lane), tl.load(place + WIDTH + lane)
    num_at, num_above = tl.max(counts), tl.max(tl.where(lane == 1, counts, 0))
    mass_at, mass_above = tl.max(masses), tl.max(tl.where(lane == 1, masses, 0))
    weight = (mass_at - mass_above) // tl.maximum(num_at - num_above, 1)
    wanted = tl.load(state + index * 2 + 1)
    # A tie is kept while what stands before it, lower ids among them, is short of both limits.
    enough = tl.where(weight > 0, tl.cdiv(wanted - mass_above, tl.maximum(weight, 1)), NEVER)
    kept = tl.minimum(tl.load(setting + 2).to(tl.int64) - num_above, enough)
    return tl.minimum(kept, num_at - num_above), mass_above, weight


@triton.jit
def _next_threshold(state, sums, setting, index, shift):
    """The last threshold of a pass at which enough is kept; the first where none is."""
    lane, place = tl.arange(0, WIDTH), sums + index * 2 * WIDTH
    counts, masses = tl.load(place + lane), tl.load(place + WIDTH + lane)
    top_k, wanted = tl.load(setting + 2).to(tl.int64), tl.load(state + index * 2 + 1)
    digit = tl.max(tl.where((counts >= top_k) | (masses >= wanted), lane, 0))
    return tl.load(state + index * 2) + (digit.to(tl.int64) << shift)


@triton.jit
def _mass_wanted(state, sums, setting, index):
    """top_p of what top-k keeps."""
    kept, mass_above, weight = ties_kept(state, sums, setting, index)
    top_p = tl.load(setting + 3)
    share = tl.ceil(top_p * (mass_above + kept * weight).to(tl.float64)).to(tl.int64)
    # top_p = 1 keeps everything, also what is lost in the rounding of weights.
    return tl.where(top_p < 1.0, tl.maximum(share, 1), NEVER)


@triton.jit(do_not_specialize=["num_splits", "tiles", "shift_before", "shift"])
def _count(
    new_state,
    new_sums,
    ties,
    state,
    sums,
    logits,
    settings,
    keys,
    n,
    num_splits,
    tiles,
    shift_before,
    shift,
    BEGIN: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """A pass. BEGIN: "" goes on with a search, "top_k" begins one, "top_p" begins one with the mass of the last."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, setting = logits + index * n, settings + index * 4
    if not is_cut(setting, n):
        return
    threshold, wanted = index * 0, index * 0 + NEVER
    if BEGIN == "":
        threshold = _next_threshold(state, sums, setting, index, shift_before)
        wanted = tl.load(state + index * 2 + 1)
    elif BEGIN == "top_p":
        wanted = _mass_wanted(state, sums, setting, index)
    if split == 0:
        tl.store(new_state + index * 2, threshold)
        tl.store(new_state + index * 2 + 1, wanted)
    lane, temperature = tl.arange(0, WIDTH), temperature_of(setting)
    thresholds = (threshold + (lane.to(tl.int64) << shift) - FIRST_BIT).to(tl.int32)
    largest = largest_of(keys, index, num_splits, MAX_SPLITS)
    lowest = largest + tl.load(setting + 1).to(tl.float32)
    count, mass = tl.zeros([TILE, WIDTH], tl.int32), tl.zeros([TILE, WIDTH], tl.int64)
    for tile in range(tiles):
        value = scaled(row, (split * tiles + tile) * TILE + tl.arange(0, TILE), n, temperature)
        value = tl.where(value >= lowest, value, float("-inf"))
        weight = (tl.exp(value - largest).to(tl.float64) * UNIT + 0.5).to(tl.int64)
        reaches = ordered_bits(value)[:, None] >= thresholds[None, :]
        count += reaches.to(tl.int32)
        mass += tl.where(reaches, weight[:, None], 0)
    counts = tl.sum(count, 0).to(tl.int64)
    tl.atomic_add(new_sums + index * 2 * WIDTH + lane, counts)
    tl.atomic_add(new_sums + index * 2 * WIDTH + WIDTH + lane, tl.sum(mass, 0))
    tied = tl.max(counts) - tl.max(tl.where(lane == 1, counts, 0))
    tl.store(ties + index * num_splits + split, tied)


class _Pass(NamedTuple):
    begin: str
    shift: int


def _passes(limits: Limits) -> Iterator[_Pass]:
    for name, wanted in (("top_k", limits.top_k), ("top_p", limits.top_p)):
        if wanted:
            yield _Pass(name, _SHIFTS[0])
            yield from (_Pass("", shift) for shift in _SHIFTS[1:])
            yield _Pass("", 0)  # at the threshold that the others have found
        elif name == "top_k":
            yield _Pass(name, 0)  # at no threshold, for the mass of all


def search(
    logits: Tensor, settings: Tensor, keys: Tensor, split_tokens: int, max_splits: int, limits: Limits
) -> Search:
    """Find where the rows that use top-k or top-p are cut.

    Args:
        logits: [N, V] float32.
        settings: as of `ops.sample_tokens`.
        keys: [N, S] float64, the largest scaled logit of each split.
        split_tokens: tokens of a split, a multiple of 256.
        max_splits: a power of two, S at most.
        limits: which are used; top_k or top_p or both.
    """
    num_rows, num_splits = keys.shape
    passes = list(_passes(limits))
    states = settings.new_empty((len(passes) + 1, num_rows, 2), dtype=torch.int64)
    sums = settings.new_zeros((len(passes) + 1, num_rows, 2, WIDTH.value), dtype=torch.int64)
    ties = settings.new_empty((num_rows, num_splits), dtype=torch.int64)
    before = 0
    for number, (begin, shift) in enumerate(passes):
        _count[(num_rows, num_splits)](
            states[number + 1], sums[number + 1], ties, states[number], sums[number], logits, settings, keys,
            logits.shape[1], num_splits, split_tokens // _TILE, before, shift,
            BEGIN=begin, TILE=_TILE, MAX_SPLITS=max_splits,
        )  # fmt: skip
        before = shift
    return Search(states[-1], sums[-1], ties)
