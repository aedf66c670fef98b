"""Where top-k and top-p end: the key of the last token that they keep, in the order of tokens.

Both keep a prefix of that order. A row is looked at three times, by as many programs as keep the device busy: for the
largest logit of each group of tokens, which bounds what can be kept from below; to count the tokens above that bound,
and their mass, in buckets of equal width; and for the choice, in which tokens of the buckets before that of the cut
have part at once, and those of its bucket are collected. One program then finds the cut among these, four bits of its
key at a time. As a rule they are some hundred at most; where they are more than there is room for, because very many
are as good as equal, that program reads the row instead.

The bound. Of top-k: k groups have a largest logit at or above the k-th largest of those, and so have k tokens. Of
top-p: tokens with less than (1 - p) / V of the mass hold less than 1 - p of it together.

Invariant: keys are all different, and masses are integers, in steps of 2**-40 of the first token's, as counts are; so
nothing depends on the order in which tokens are counted, collected and added up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.token_order import MAX_LOGIT, ordered_bits

GROUP = tl.constexpr(128)
"""Tokens of a group."""
BUCKETS = tl.constexpr(2048)
CAPACITY = 4096
"""Tokens of a row that are collected."""
UNIT = tl.constexpr(float(2**40))
ID_BITS = tl.constexpr(31)
"""Of a key, below the 32 of the logit."""
ID_END = tl.constexpr(2**31)
HALF = tl.constexpr(2**31)
"""Between ordered bits, which are signed, and those of a key, which count from 0."""
DIGITS = tl.constexpr(16)
"""Of a number that is looked for digit by digit: what is tried at once."""
DIGIT_BITS = tl.constexpr(4)
SPAN = 4
"""Numbers that `store_span` keeps of a row."""
LAST_KEY = tl.constexpr(2**63 - 1)
"""Beyond those of all tokens."""
LEAST_WIDTH = tl.constexpr(1e-30)


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
    bits = ordered_bits(values)
    # Two bits at a time: more would take registers from the programs that read the row.
    last, digit = count * 0, tl.arange(0, 4).to(tl.int64)
    for step in range(16):
        shift = 30 - step * 2
        trial = (last + (digit << shift) - HALF).to(tl.int32)
        number = tl.sum((bits[:, None] >= trial[None, :]).to(tl.int32), 0)
        last += (tl.sum((number >= count).to(tl.int64)) - 1) << shift
    return tl.where((last <= 0) | (count > values.shape[0]), float("-inf"), value_of(last << ID_BITS))


@triton.jit
def store_span(
    span, group_largest, smallest, setting, n, num_groups, num_splits, is_first,
    GROUPS: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """A row's span: its largest logit, the least that min-p keeps, a bound of those that top-k and top-p may keep, and
    buckets per logit from the largest to the bound. All programs of a row find it, and the first one writes it down."""
    group, split = tl.arange(0, GROUPS), tl.arange(0, MAX_SPLITS)
    values = tl.load(group_largest + group, mask=group < num_groups, other=float("-inf"))
    largest = tl.max(values)
    lowest = largest + tl.load(setting + 1).to(tl.float32)
    top_k, top_p = tl.load(setting + 2), tl.load(setting + 3)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    least = tl.min(tl.load(smallest + split, mask=split < num_splits, other=float("inf")))
    bound = tl.maximum(lowest, least)
    if top_k < n:
        bound = tl.maximum(bound, _last_of(values, top_k.to(tl.int64)))
    elif top_p < 1.0:
        # The groups' largest tokens have less mass than all, and a quarter of that makes good for all rounding.
        share = (1.0 - top_p).to(tl.float32) * tl.sum(tl.exp(values - largest)) / (4.0 * n)
        bound = tl.maximum(bound, largest + tl.log(share))
    width = 0.5 * largest - 0.5 * bound  # of halves, whose difference is no infinity
    per_logit = tl.where(width > LEAST_WIDTH, BUCKETS / tl.maximum(width, LEAST_WIDTH), 0.0)
    if is_first:
        tl.store(span, largest)
        tl.store(span + 1, lowest)
        tl.store(span + 2, bound)
        tl.store(span + 3, per_logit)
    return largest, lowest, bound, per_logit


@triton.jit
def load_span(span):
    """What `store_span` has written."""
    return tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)


@triton.jit
def _bucket_of(value, span):
    """The bucket of values that may stay; others have the first one. Of two logits, the higher one's is never behind
    the lower one's, whatever is rounded."""
    largest, _, bound, per_logit = span
    value = tl.where(value >= bound, value, largest)
    return tl.minimum((0.5 * largest - 0.5 * value) * per_logit, BUCKETS - 1.0).to(tl.int32)


@triton.jit
def _may_stay(value, span):
    _, _, bound, _ = span
    return (value >= bound) & (value > float("-inf"))


@triton.jit
def tally(
    counts, masses, found, row, setting, first, n, tiles, temperature, span, TILE: tl.constexpr
):  # fmt: skip
    """Add a split's tokens to the numbers and masses of a row's buckets, as far as they are wanted, and to found[1],
    the mass of all."""
    largest, lowest, _, _ = span
    wants_count, wants_mass = tl.load(setting + 2) < n, tl.load(setting + 3) < 1.0
    mass = tl.zeros([TILE], tl.int64)
    for tile in range(tiles):
        value = scaled(row, first + tile * TILE + tl.arange(0, TILE), n, temperature)
        value = tl.where(value >= lowest, value, float("-inf"))
        bucket, may_stay = _bucket_of(value, span), _may_stay(value, span)
        if wants_count:
            one = tl.full([TILE], 1, tl.int32)
            tl.atomic_add(counts + bucket, one, mask=may_stay, sem="relaxed")
        if wants_mass:
            weight = _weight_of(value, largest)
            tl.atomic_add(masses + bucket, weight, mask=may_stay, sem="relaxed")
            mass += weight
    if wants_mass:
        tl.atomic_add(found + 1, tl.sum(mass), sem="relaxed")


@triton.jit
def _wanted_of(top_p, mass):
    """The mass that top-p keeps at least."""
    return tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _end_of(reached, wanted):
    """The bucket in which so much is reached, one beyond all if it is in none, and what is reached before it."""
    is_before = reached < wanted
    return tl.sum(is_before.to(tl.int32)), tl.max(tl.where(is_before, reached, 0))


@triton.jit
def unsure_buckets(counts, masses, found, setting, n):
    """The buckets that the cut may be in: from the first to the last one, and that where top-k ends; and how many
    tokens of that are kept, the mass before it, and the mass before the first one.

    Tokens of buckets before the first are kept. Where there is no such bucket, it is one beyond all.
    """
    bucket, everything = tl.arange(0, BUCKETS), tl.load(found + 1)
    top_k, top_p = tl.load(setting + 2), tl.load(setting + 3)
    mass = tl.load(masses + bucket)
    end_k, left, before_k = tl.full([], BUCKETS, tl.int32), everything * 0, everything
    least, most = everything, everything
    if top_k < n:
        end_k, before = _end_of(tl.cumsum(tl.load(counts + bucket)).to(tl.int64), top_k.to(tl.int64))
        left = top_k.to(tl.int64) - before
        before_k = tl.sum(tl.where(bucket < end_k, mass, 0))
        least, most = before_k, tl.sum(tl.where(bucket <= end_k, mass, 0))
    first, last, before_first = end_k, end_k, before_k
    # top_p = 1 keeps everything, also what is lost in the rounding of weights.
    if top_p < 1.0:
        reached = tl.cumsum(mass)
        first, before_first = _end_of(reached, _wanted_of(top_p, least))
        last, _ = _end_of(reached, _wanted_of(top_p, most))
    return first, last, end_k, left, before_k, before_first


@triton.jit
def _is_unsure(value, span, unsure):
    first, last, end_k, _, _, _ = unsure
    bucket = _bucket_of(value, span)
    return _may_stay(value, span) & (((bucket >= first) & (bucket <= last)) | (bucket == end_k))


@triton.jit
def parted(value, column, n, keys, found, span, unsure, CAPACITY: tl.constexpr):
    """Which tokens of a tile are kept for sure; those that may be are put among a row's keys, found[0] of them."""
    is_unsure = _is_unsure(value, span, unsure)
    count = tl.sum(is_unsure.to(tl.int64))
    if count > 0:
        place = tl.atomic_add(found, count, sem="relaxed") + tl.cumsum(is_unsure.to(tl.int32)) - 1
        tl.store(keys + place, _key_of(value, column, n), mask=is_unsure & (place < CAPACITY))
    return _may_stay(value, span) & (_bucket_of(value, span) < unsure[0])


@triton.jit
def keys_of(
    tile, keys, row, n, count, temperature, span, unsure, TILE: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """A tile of the keys that were collected or, where there was no room for all, of the row's; -1 is none."""
    place = tile * TILE + tl.arange(0, TILE)
    # One return for both: Triton 3.6 compiles no kernel that calls a function with a return in each.
    if count <= CAPACITY:
        key = tl.load(keys + place, mask=place < count, other=-1)
    else:
        value = scaled(row, place, n, temperature)
        key = tl.where(_is_unsure(value, span, unsure), _key_of(value, place, n), -1)
    return key


@triton.jit
def num_tiles(count, n, TILE: tl.constexpr, CAPACITY: tl.constexpr):
    """Of keys."""
    return tl.cdiv(tl.where(count <= CAPACITY, count, n), TILE)


@triton.jit
def _ends(
    keys, row, n, count, temperature, span, unsure, TILE: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """The lowest key, and in how many digits the others differ from it."""
    low, high = tl.full([TILE], LAST_KEY, tl.int64), tl.full([TILE], -1, tl.int64)
    for tile in range(num_tiles(count, n, TILE, CAPACITY)):
        key = keys_of(tile, keys, row, n, count, temperature, span, unsure, TILE, CAPACITY)
        low, high = tl.minimum(low, tl.where(key < 0, LAST_KEY, key)), tl.maximum(high, key)
    lowest = tl.min(low)
    difference = tl.maximum(tl.max(high) - lowest, 0)
    return lowest, tl.sum((difference >> (tl.arange(0, DIGITS).to(tl.int64) * DIGIT_BITS) > 0).to(tl.int32))


@triton.jit
def _amounts(
    trial, keys, row, n, count, temperature, span, unsure,
    OF_K: tl.constexpr, BY_MASS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """How many tokens stand at or above each of some keys or, BY_MASS, what mass they have; OF_K, of those alone in
    whose bucket top-k ends."""
    amount = tl.zeros(trial.shape, tl.int64)
    for tile in range(num_tiles(count, n, TILE, CAPACITY)):
        key = keys_of(tile, keys, row, n, count, temperature, span, unsure, TILE, CAPACITY)
        value = tl.where(
            key >= 0, value_of(key), span[0]
        )  # a lane without a token has a key that is no number
        each = tl.full([TILE], 1, tl.int64)
        if BY_MASS:
            each = _weight_of(value, span[0])
        if OF_K:
            each = tl.where(_bucket_of(value, span) == unsure[2], each, 0)
        amount += tl.sum(tl.where(key[:, None] >= trial[None, :], each[:, None], 0), 0)
    return amount


@triton.jit
def _cut_at(
    wanted, low, rounds, keys, row, n, count, temperature, span, unsure,
    OF_K: tl.constexpr, BY_MASS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The largest key at which so many tokens, or so much mass, is reached; the lowest one, `low`: never."""
    cut, digit = low, tl.arange(0, DIGITS).to(tl.int64)
    for step in range(rounds):
        shift = ((rounds - 1 - step) * DIGIT_BITS).to(tl.int64)
        trial = cut + (digit << shift)
        trial = tl.where(trial < cut, LAST_KEY, trial)  # beyond all that has 63 bits
        reached = _amounts(
            trial, keys, row, n, count, temperature, span, unsure, OF_K, BY_MASS, TILE, CAPACITY
        )
        number = tl.sum(((reached >= wanted) & (trial < LAST_KEY)).to(tl.int64))
        cut += tl.maximum(number - 1, 0) << shift
    return cut


@triton.jit
def find_cut(
    setting, keys, row, n, count, temperature, span, unsure, TILE: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """The key of the last token that a row keeps, of `count` that were collected."""
    _, _, _, left, before_k, before_first = unsure
    top_k, top_p = tl.load(setting + 2), tl.load(setting + 3)
    low, rounds = _ends(keys, row, n, count, temperature, span, unsure, TILE, CAPACITY)
    cut, mass = low, before_k
    if top_k < n:
        cut = _cut_at(
            left, low, rounds, keys, row, n, count, temperature, span, unsure, True, False, TILE, CAPACITY
        )
        at_cut = tl.full([1], 0, tl.int64) + cut
        mass += tl.sum(
            _amounts(at_cut, keys, row, n, count, temperature, span, unsure, True, True, TILE, CAPACITY)
        )
    if top_p < 1.0:
        wanted = _wanted_of(top_p, mass) - before_first
        cut = _cut_at(
            wanted, low, rounds, keys, row, n, count, temperature, span, unsure, False, True, TILE, CAPACITY
        )
    return cut
