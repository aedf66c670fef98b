"""Where top-k and top-p end: the key of the last token that they keep, in the order of tokens.

Both keep a prefix of that order. A row is looked at twice, by as many programs as keep the device busy: first for the
largest logit of each group of tokens, which bounds what can be kept from below, then to collect the tokens above that
bound. One program then finds the cut among them, bit by bit of its key. As a rule they are some hundred; where they
are more than there is room for, it reads the row instead.

The bound. Of top-k: k groups have a largest logit at or above the k-th largest of those, and so have k tokens. Of
top-p: tokens with less than (1 - p) / V of the mass hold less than 1 - p of it together.

Invariant: keys are all different, and masses are integers, in steps of 2**-40 of the first token's, as counts are; so
nothing depends on the order in which tokens are collected and added up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.token_order import MAX_LOGIT, ordered_bits

GROUP = tl.constexpr(128)
"""Tokens of a group."""
CAPACITY = 16384
"""Tokens of a row that are collected."""
UNIT = tl.constexpr(float(2**40))
ID_BITS = tl.constexpr(31)
"""Of a key, below the 32 of the logit."""
ID_END = tl.constexpr(2**31)
HALF = tl.constexpr(2**31)
"""Between ordered bits, which are signed, and those of a key, which count from 0."""


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
def is_cut(setting, n):
    """Whether a row uses top-k or top-p."""
    return (tl.load(setting + 2) < n) | (tl.load(setting + 3) < 1.0)


@triton.jit
def _key_of(value, token, n):
    """The order of tokens as a number of 63 bits: the higher logit first and, of equal ones, the lower id."""
    return ((ordered_bits(value).to(tl.int64) + HALF) << ID_BITS) + (n - 1 - token)


@triton.jit
def token_of(key, n):
    """The token of a key."""
    return n - 1 - (key & (ID_END - 1)).to(tl.int32)


@triton.jit
def value_of(key):
    """The scaled logit of a key."""
    bits = ((key >> ID_BITS) - HALF).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(value, largest):
    """A token's mass."""
    return (tl.exp(value - largest).to(tl.float64) * UNIT + 0.5).to(tl.int64)


@triton.jit
def _last_of(values, count):
    """The logit that is the so-many-th largest of some; -inf if they are fewer."""
    bits = ordered_bits(values).to(tl.int64) + HALF
    last = count * 0
    for step in range(32):
        trial = last + (tl.full([], 1, tl.int64) << (31 - step))
        last = tl.where(tl.sum((bits >= trial).to(tl.int32)) >= count, trial, last)
    return tl.where(last == 0, float("-inf"), value_of(last << ID_BITS))


@triton.jit
def bounds(group_largest, setting, index, n, num_groups, GROUPS: tl.constexpr):
    """A row's largest logit, the least that min-p keeps, and a bound of those that top-k and top-p may keep."""
    group = tl.arange(0, GROUPS)
    place = group_largest + index * num_groups + group
    values = tl.load(place, mask=group < num_groups, other=float("-inf"))
    largest = tl.max(values)
    lowest = largest + tl.load(setting + 1).to(tl.float32)
    top_k, top_p = tl.load(setting + 2), tl.load(setting + 3)
    bound = lowest
    if top_k < n:
        bound = tl.maximum(lowest, _last_of(values, top_k.to(tl.int64)))
    elif top_p < 1.0:
        reference = tl.where(largest == float("-inf"), 0.0, largest)
        # The groups' largest tokens have less mass than all, and a quarter of that makes good for all rounding.
        share = (1.0 - top_p).to(tl.float32) * tl.sum(tl.exp(values - reference)) / (4.0 * n)
        bound = tl.maximum(lowest, reference + tl.log(share))
    return largest, lowest, bound


@triton.jit
def collect(
    keys, found, row, setting, index, first, n, tiles, temperature, largest, lowest, bound,
    TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Add a split's tokens at or above the bound to a row's keys; found [N, 2] int64: how many, and the mass of all."""
    mass = tl.zeros([TILE], tl.int64)
    wants_mass = tl.load(setting + 2) >= n  # else it is that of what top-k keeps
    for tile in range(tiles):
        column = first + tile * TILE + tl.arange(0, TILE)
        value = scaled(row, column, n, temperature)
        value = tl.where(value >= lowest, value, float("-inf"))
        if wants_mass:
            mass += _weight_of(value, largest)
        is_kept = (value >= bound) & (value > float("-inf"))
        count = tl.sum(is_kept.to(tl.int64))
        if count > 0:
            place = (
                tl.atomic_add(found + index * 2, count, sem="relaxed") + tl.cumsum(is_kept.to(tl.int32)) - 1
            )
            key = _key_of(value, column, n)
            tl.store(keys + index * CAPACITY + place, key, mask=is_kept & (place < CAPACITY))
    tl.atomic_add(found + index * 2 + 1, tl.sum(mass), sem="relaxed")


@triton.jit
def keys_of(tile, keys, row, index, n, count, temperature, bound, TILE: tl.constexpr, CAPACITY: tl.constexpr):
    """A tile of the keys that were collected or, where there was no room for all, of the row's; -1 is none."""
    place = tile * TILE + tl.arange(0, TILE)
    if count <= CAPACITY:
        return tl.load(keys + index * CAPACITY + place, mask=place < count, other=-1)
    else:
        value = scaled(row, place, n, temperature)
        return tl.where((value >= bound) & (place < n), _key_of(value, place, n), -1)


@triton.jit
def _amount(
    cut, keys, row, index, n, count, temperature, largest, bound,
    BY_MASS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """How many tokens stand at or above a key, or the mass that they have."""
    amount = tl.zeros([TILE], tl.int64)
    for tile in range(tl.cdiv(tl.where(count <= CAPACITY, count, n), TILE)):
        key = keys_of(tile, keys, row, index, n, count, temperature, bound, TILE, CAPACITY)
        each = tl.full([TILE], 1, tl.int64)
        if BY_MASS:
            # A lane without a token has a key that is no number.
            each = _weight_of(tl.where(key >= cut, value_of(key), largest), largest)
        amount += tl.where(key >= cut, each, 0)
    return tl.sum(amount)


@triton.jit
def _cut_at(
    wanted, keys, row, index, n, count, temperature, largest, bound,
    BY_MASS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The largest key at which so many tokens, or so much mass, is reached; 0: never."""
    cut = wanted * 0
    for step in range(63):
        bit = tl.full([], 1, tl.int64) << (62 - step)
        if (bit >= ID_END) | (bit < n):  # others are 0 in every key
            trial = cut + bit
            reached = _amount(
                trial, keys, row, index, n, count, temperature, largest, bound, BY_MASS, TILE, CAPACITY
            )
            cut = tl.where(reached >= wanted, trial, cut)
    return cut


@triton.jit
def find_cut(
    keys, row, setting, index, n, count, mass, temperature, largest, bound,
    TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The key of the last token that a row keeps, of `count` collected ones; `mass` is that of all."""
    top_k, top_p = tl.load(setting + 2), tl.load(setting + 3)
    cut = count * 0
    if top_k < n:
        wanted = top_k.to(tl.int64)
        cut = _cut_at(wanted, keys, row, index, n, count, temperature, largest, bound, False, TILE, CAPACITY)
        mass = _amount(cut, keys, row, index, n, count, temperature, largest, bound, True, TILE, CAPACITY)
    # top_p = 1 keeps everything, also what is lost in the rounding of weights.
    if top_p < 1.0:
        wanted = tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1)
        cut = _cut_at(wanted, keys, row, index, n, count, temperature, largest, bound, True, TILE, CAPACITY)
    return cut
