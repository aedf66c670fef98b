# SPDX-License-Identifier: Apache-2.0
"""Top-k and top-p cut-off, split-k accumulation, and pairwise decoding of integer codes.

Cut-off: the key of the last token that top-k and top-p keep, a prefix of the order of tokens. A row is read three
times, by as many programs as keep the device busy: for the largest logit of each group of tokens, which gives a lower
bound of kept tokens; to count the tokens above that bound, and their mass, in buckets of equal width; and for sampling,
in which tokens of the buckets before the cut-off's take part at once, and those of its bucket are collected. One
program then finds the cut-off among these, four bits of its key at a time. Typically they are some hundred at most; if
they exceed the capacity, because very many are nearly equal, that program reads the row instead. The bound for top-k: k
groups have a largest logit at or above the k-th largest of those, and so have k tokens. For top-p: tokens with less
than (1 - p) / V of the mass hold less than 1 - p of it together.

Split-k: a matmul with a narrow weight is split along k into parts computed by separate programs.

Decoding: integer codes become 16-bit floats, two per instruction, on NVIDIA GPUs by inline assembly. The compiler
generates twice as many instructions, which take longer than reading the weights.

Invariant: keys are all different, and counts and masses are integers (steps of 2**-40 of the first token's mass), so
nothing depends on the order of counting, collecting and adding. Split-k parts follow from the weight and the tile
alone, and the last program adds them in order. Decoding is exact, so it has the bits of the plain method.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.linear import PackedWeight
from quire.kernels.triton.launch import next_power_of_2

PROGRAMS = 264
"""Programs that fill a large GPU twice: a narrow weight is split along k until it has that many."""
MAX_PARTS = 16


def split_k(tiles: int, steps: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """Return the number of parts that the steps of k are split into, for a number of output tiles, and the steps in
    each.
    """
    wanted = min(max(programs // tiles, 1), MAX_PARTS, steps)
    steps_per_part = triton.cdiv(steps, wanted)
    return triton.cdiv(steps, steps_per_part), steps_per_part


def room_for_parts(out: Tensor, weight: PackedWeight, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return `parts` and `arrived` of `put`, for the tiles and parts of a grid."""
    tiles, num_parts = grid[0] * grid[1], grid[2]
    if num_parts == 1:
        return out, out
    # A weight has its own counters, which kernels leave at 0, since its matmuls never overlap.
    counts: Tensor | None = weight.native
    if counts is None or len(counts) < tiles:
        counts = torch.zeros(next_power_of_2(tiles), dtype=torch.int32, device=out.device)
        object.__setattr__(weight, "native", counts)
    return torch.empty(num_parts, *out.shape, dtype=torch.float32, device=out.device), counts


@triton.jit
def put(
    out, parts, arrived, sums, bias, row, output, rows, outputs, num_parts,
    HAS_BIAS: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """Write this program's sums [M, N], a part of k, into out [rows, outputs], with all parts added in order.

    The last program to arrive adds them. arrived [tiles] counts arrivals, and returns to 0.
    """
    used = (row < rows)[:, None] & (output < outputs)[None, :]
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    if IN_PARTS:
        size, tile = (
            rows.to(tl.int64) * outputs,
            arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0),
        )
        tl.store(parts + tl.program_id(2) * size + place, sums, mask=used)
        tl.debug_barrier()  # all threads' stores come before this program's count
        if tl.atomic_add(tile, 1, sem="acq_rel") < num_parts - 1:
            return
        tl.debug_barrier()
        sums = tl.zeros(sums.shape, tl.float32)
        for part in range(num_parts):
            sums += tl.load(parts + part * size + place, mask=used, other=0.0, cache_modifier=".cg")
        tl.store(tile, 0)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=used)


BFLOAT16_BASE, FLOAT16_BASE = tl.constexpr(128), tl.constexpr(1024)
"""Numbers from which on a float's last bit is 1."""

_SPLIT = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


def _of_nibbles(dtype: str, base: str, one: str, shift: int) -> str:
    """Return assembly that moves the four bits at `shift` to the end of a float at the base, and subtracts the base."""
    return f"""{{
        .reg .b32 code, base, one;
        mov.b32 base, {base};
        mov.b32 one, {one};
        shr.u32 code, $1, {shift};
        lop3.b32 code, code, 0x000f000f, base, 0xea;
        fma.rn.{dtype}x2 $0, code, one, $2;
    }}"""


_BFLOAT16_NIBBLES = tl.constexpr(
    tuple(_of_nibbles("bf16", "0x43004300", "0x3f803f80", shift) for shift in range(0, 16, 4))
)
_FLOAT16_NIBBLES = tl.constexpr(
    tuple(_of_nibbles("f16", "0x64006400", "0x3c003c00", shift) for shift in range(0, 16, 4))
)


@triton.jit
def split_words(words):
    """Return the low and the high halves of words, int32: two tensors of int16."""
    return tl.inline_asm_elementwise(
        _SPLIT, "=r,=r,r,r", [words], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
    )


@triton.jit
def nibbles_less(halves, quarter: tl.constexpr, zero, dtype: tl.constexpr):
    """Return the four bits at 4 * quarter of 16-bit numbers, minus a broadcast int32: bfloat16 or float16."""
    if dtype == tl.bfloat16:
        less = (-(zero + BFLOAT16_BASE)).to(tl.bfloat16)
        return tl.inline_asm_elementwise(
            _BFLOAT16_NIBBLES[quarter], "=r,r,r", [halves, less], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        less = (-(zero + FLOAT16_BASE)).to(tl.float16)
        return tl.inline_asm_elementwise(
            _FLOAT16_NIBBLES[quarter], "=r,r,r", [halves, less], dtype=tl.float16, is_pure=True, pack=2
        )


GROUP = tl.constexpr(128)
"""Tokens per group."""
BUCKETS = tl.constexpr(2048)
CAPACITY = 4096
"""Largest number of collected tokens of a row."""
UNIT = tl.constexpr(float(2**40))
ID_BITS = tl.constexpr(31)
"""Bits of a key below the logit's 32."""
ID_END = tl.constexpr(2**31)
HALF = tl.constexpr(2**31)
"""Offset between ordered bits, which are signed, and those of a key, which count from 0."""
DIGITS = tl.constexpr(16)
"""Values of a digit tried at once in the search."""
DIGIT_BITS = tl.constexpr(4)
SPAN = 4
"""Numbers per row written by `store_span`."""
LAST_KEY = tl.constexpr(2**63 - 1)
"""Greater than any token's key."""
LEAST_WIDTH = tl.constexpr(1e-30)


@triton.jit
def scaled(row, column, n, temperature):
    """Return a tile's logits divided by the temperature; -inf outside the row."""
    value = tl.load(row + column, mask=column < n, other=float("-inf"))
    return tl.minimum(value / temperature, MAX_LOGIT)


@triton.jit
def temperature_of(setting):
    """Return the divisor of logits: 1 for greedy rows."""
    asked = tl.load(setting).to(tl.float32)
    return tl.where(asked == 0.0, 1.0, asked)


@triton.jit
def is_limited(setting, n):
    """Return whether a row uses top-k or top-p."""
    return (tl.load(setting + 2) < n) | (tl.load(setting + 3) < 1.0)


@triton.jit
def _key_of(value, token, n):
    """Return the order of tokens as a 63-bit number: the higher logit first and, of equal ones, the lower id."""
    return ((ordered_bits(value).to(tl.int64) + HALF) << ID_BITS) + (n - 1 - token)


@triton.jit
def token_of(key, n):
    """Return the token of a key."""
    return n - 1 - (key & (ID_END - 1)).to(tl.int32)


@triton.jit
def value_of(key):
    """Return the scaled logit of a key."""
    bits = ((key >> ID_BITS) - HALF).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(value, largest):
    """Return a token's mass."""
    return (tl.exp(value - largest).to(tl.float64) * UNIT + 0.5).to(tl.int64)


@triton.jit
def _last_of(values, count):
    """Return the count-th largest logit; -inf if there are fewer."""
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
    """Compute a row's span: its largest logit, min-p's least kept logit, the bound for top-k and top-p, and buckets per
    logit from the largest to the bound. All programs of a row compute it, and the first one writes it.
    """
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
        # The groups' largest tokens have less mass than all, and a quarter of that compensates for all rounding.
        share = (1.0 - top_p).to(tl.float32) * tl.sum(tl.exp(values - largest)) / (4.0 * n)
        bound = tl.maximum(bound, largest + tl.log(share))
    width = 0.5 * largest - 0.5 * bound  # of halves, whose difference is not infinite
    per_logit = tl.where(width > LEAST_WIDTH, BUCKETS / tl.maximum(width, LEAST_WIDTH), 0.0)
    if is_first:
        tl.store(span, largest)
        tl.store(span + 1, lowest)
        tl.store(span + 2, bound)
        tl.store(span + 3, per_logit)
    return largest, lowest, bound, per_logit


@triton.jit
def load_span(span):
    """Load what `store_span` wrote."""
    return tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)


@triton.jit
def _bucket_of(value, span):
    """Return the bucket of candidate values; others get the first one. A higher logit's bucket is never after a lower
    one's, despite rounding.
    """
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
    """Add a split's candidates to the counts and masses of a row's buckets, and the total mass to found[1]."""
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
    """Return the least mass that top-p keeps."""
    return tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _end_of(reached, wanted):
    """Return the bucket in which `wanted` is reached, one beyond all if none, and the sum before it."""
    is_before = reached < wanted
    return tl.sum(is_before.to(tl.int32)), tl.max(tl.where(is_before, reached, 0))


@triton.jit
def unsure_buckets(counts, masses, found, setting, n):
    """Return the buckets that may contain the cut-off, first to last, and the one where top-k ends; and how many of its
    tokens are kept, the mass before it, and the mass before the first one.

    Tokens of buckets before the first are kept. A missing bucket is one beyond all.
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
    # top_p = 1 keeps everything, including mass lost in the rounding of weights.
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
    """Return which tokens of a tile are certainly kept; append uncertain ones to a row's keys, found[0] of them."""
    is_unsure = _is_unsure(value, span, unsure)
    count = tl.sum(is_unsure.to(tl.int64))
    if count > 0:
        place = tl.atomic_add(found, count, sem="relaxed") + tl.cumsum(is_unsure.to(tl.int32)) - 1
        tl.store(keys + place, _key_of(value, column, n), mask=is_unsure & (place < CAPACITY))
    return _may_stay(value, span) & (_bucket_of(value, span) < unsure[0])


@triton.jit
def candidate_keys(
    tile, keys, row, n, count, temperature, span, unsure, TILE: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """Return a tile of the collected keys or, if they exceeded the capacity, of the row's; -1 is none."""
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
    """Return the number of key tiles."""
    return tl.cdiv(tl.where(count <= CAPACITY, count, n), TILE)


@triton.jit
def _ends(
    keys, row, n, count, temperature, span, unsure, TILE: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """Return the lowest key, and the number of digits in which the others differ from it."""
    low, high = tl.full([TILE], LAST_KEY, tl.int64), tl.full([TILE], -1, tl.int64)
    for tile in range(num_tiles(count, n, TILE, CAPACITY)):
        key = candidate_keys(tile, keys, row, n, count, temperature, span, unsure, TILE, CAPACITY)
        low, high = tl.minimum(low, tl.where(key < 0, LAST_KEY, key)), tl.maximum(high, key)
    lowest = tl.min(low)
    difference = tl.maximum(tl.max(high) - lowest, 0)
    return lowest, tl.sum((difference >> (tl.arange(0, DIGITS).to(tl.int64) * DIGIT_BITS) > 0).to(tl.int32))


@triton.jit
def _amounts(
    trial, keys, row, n, count, temperature, span, unsure,
    OF_K: tl.constexpr, BY_MASS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Return the number of tokens at or above each trial key or, BY_MASS, their mass; OF_K, only in top-k's last
    bucket.
    """
    amount = tl.zeros(trial.shape, tl.int64)
    for tile in range(num_tiles(count, n, TILE, CAPACITY)):
        key = candidate_keys(tile, keys, row, n, count, temperature, span, unsure, TILE, CAPACITY)
        value = tl.where(key >= 0, value_of(key), span[0])  # a lane without a token has an invalid key
        each = tl.full([TILE], 1, tl.int64)
        if BY_MASS:
            each = _weight_of(value, span[0])
        if OF_K:
            each = tl.where(_bucket_of(value, span) == unsure[2], each, 0)
        amount += tl.sum(tl.where(key[:, None] >= trial[None, :], each[:, None], 0), 0)
    return amount


@triton.jit
def _cutoff_at(
    wanted, low, rounds, keys, row, n, count, temperature, span, unsure,
    OF_K: tl.constexpr, BY_MASS: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Return the largest key at which `wanted` tokens, or mass, is reached; if never, the lowest one, `low`."""
    cutoff, digit = low, tl.arange(0, DIGITS).to(tl.int64)
    for step in range(rounds):
        shift = ((rounds - 1 - step) * DIGIT_BITS).to(tl.int64)
        trial = cutoff + (digit << shift)
        trial = tl.where(trial < cutoff, LAST_KEY, trial)  # beyond all 63-bit keys
        reached = _amounts(
            trial, keys, row, n, count, temperature, span, unsure, OF_K, BY_MASS, TILE, CAPACITY
        )
        number = tl.sum(((reached >= wanted) & (trial < LAST_KEY)).to(tl.int64))
        cutoff += tl.maximum(number - 1, 0) << shift
    return cutoff


@triton.jit
def find_cutoff(
    setting, keys, row, n, count, temperature, span, unsure, TILE: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """Return the key of the last token that a row keeps, from `count` collected ones."""
    _, _, _, left, before_k, before_first = unsure
    top_k, top_p = tl.load(setting + 2), tl.load(setting + 3)
    low, rounds = _ends(keys, row, n, count, temperature, span, unsure, TILE, CAPACITY)
    cutoff, mass = low, before_k
    if top_k < n:
        cutoff = _cutoff_at(
            left, low, rounds, keys, row, n, count, temperature, span, unsure, True, False, TILE, CAPACITY
        )
        at_cutoff = tl.full([1], 0, tl.int64) + cutoff
        mass += tl.sum(
            _amounts(at_cutoff, keys, row, n, count, temperature, span, unsure, True, True, TILE, CAPACITY)
        )
    if top_p < 1.0:
        wanted = _wanted_of(top_p, mass) - before_first
        cutoff = _cutoff_at(
            wanted, low, rounds, keys, row, n, count, temperature, span, unsure, False, True, TILE, CAPACITY
        )
    return cutoff


MAX_LOGIT = tl.constexpr(3.4028234663852886e38)
NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def ordered_bits(value):
    """Return a float's bits as an int32 with the same order."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes -0.0 and 0.0 equal
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_keys(value, column, n):
    """Return the order of tokens as one number: the higher logit first and, of equal ones, the lower id."""
    key = (ordered_bits(value).to(tl.int64) << 32) + (n - 1 - column)
    return tl.where(column < n, key, NO_KEY)


@triton.jit
def id_of(key, n):
    """Return the token of a key."""
    return n - 1 - (key & 0xFFFFFFFF)
