"""The sampling tail on a GPU: one program per row of logits, which is read from the cache a few times and never copied.

Top-k and top-p keep a prefix of the order of tokens, so what is looked for is the last logit of that prefix. It is
found by bisection on its bits, several thresholds to a pass, instead of by sorting. Random numbers: J. Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

Invariant: a row's results depend on that row alone; sums run over tiles in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference_sampling

TILE = 2048
MAX_TOP = 64
"""Most top tokens that are found by as many passes over a row; beyond, sorting is cheaper."""

MAX_LOGIT = tl.constexpr(3.4028234663852886e38)
LEAST_BITS = tl.constexpr(-(2**31))
NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def _non_finite(out, logits, n, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    found = tl.zeros([TILE], tl.int32)
    for start in range(0, n, TILE):
        column = start + tl.arange(0, TILE)
        value = tl.load(logits + row * n + column, mask=column < n, other=0.0)
        # NaN and infinity are what differs from itself times 0.
        found |= (value * 0.0 != 0.0).to(tl.int32)
    tl.store(out + row, tl.max(found) > 0)


@triton.jit
def _penalise(logits, indices, repetition, subtracted, count, TILE: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = entry < count
    place = logits + tl.load(indices + entry, mask=inside, other=0)
    value = tl.load(place, mask=inside, other=0.0).to(tl.float64)
    factor = tl.load(repetition + entry, mask=inside, other=1.0)
    value = tl.where(value > 0, value / factor, value * factor)
    value -= tl.load(subtracted + entry, mask=inside, other=0.0)
    tl.store(place, tl.minimum(value, MAX_LOGIT).to(tl.float32), mask=inside)


@triton.jit
def _ordered_bits(value):
    """A float's bits as an int32 that sorts as it does."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes -0.0 and 0.0 equal
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(value, column, n):
    """The order of tokens as one number: the higher logit first and, of equal ones, the lower id."""
    key = (_ordered_bits(value).to(tl.int64) << 32) + (n - 1 - column)
    return tl.where(column < n, key, NO_KEY)


@triton.jit
def _scaled(row, column, n, temperature):
    """Logits of a tile divided by the temperature; -inf outside the row."""
    value = tl.load(row + column, mask=column < n, other=float("-inf"))
    return tl.minimum(value / temperature, MAX_LOGIT)


@triton.jit
def _weights(value, largest, lowest):
    """Weights relative to the most likely token, and 0 for what min_p drops."""
    return tl.where(value >= lowest, tl.exp(value - largest), 0.0).to(tl.float64)


@triton.jit
def _above(row, n, temperature, largest, lowest, bits, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Number and mass of the tokens whose ordered bits exceed each of `bits` [WIDTH]."""
    count = tl.zeros([WIDTH], tl.int64)
    mass = tl.zeros([WIDTH], tl.float64)
    for start in range(0, n, TILE):
        column = start + tl.arange(0, TILE)
        value = _scaled(row, column, n, temperature)
        value = tl.where(value >= lowest, value, float("-inf"))
        exceeds = _ordered_bits(value).to(tl.int64)[:, None] > bits[None, :]
        count += tl.sum(exceeds.to(tl.int64), 0)
        mass += tl.sum(tl.where(exceeds, _weights(value, largest, lowest)[:, None], 0.0), 0)
    return count, mass


@triton.jit
def _last_kept(
    row,
    n,
    temperature,
    largest,
    lowest,
    low,
    high,
    max_count,
    max_mass,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The least ordered bits in [low, high] above which stand fewer than `max_count` tokens and less than `max_mass`.

    Holds for `high`. Each pass leaves a WIDTH-th part of the range.
    """
    index = tl.arange(0, WIDTH).to(tl.int64)
    while low < high:
        bits = low + (high - low) * index // WIDTH
        count, mass = _above(row, n, temperature, largest, lowest, bits, TILE, WIDTH)
        holds = (count < max_count) & (mass < max_mass)
        # Those that hold are the last ones.
        first = WIDTH - tl.sum(holds.to(tl.int64))
        new_high = tl.min(tl.where(index == first, bits, high))
        low = tl.max(tl.where(index < first, bits + 1, low))
        high = new_high
    return low


@triton.jit
def _at(row, n, temperature, largest, lowest, bits, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Number and mass of the tokens above some ordered bits; number (1 if none) and weight of those at them."""
    threshold = bits - tl.arange(0, WIDTH).to(tl.int64)
    counts, masses = _above(row, n, temperature, largest, lowest, threshold, TILE, WIDTH)
    # Thresholds fall, so the first is the least of all sums, and the second is found by its index.
    second = tl.arange(0, WIDTH) == 1
    count, mass = tl.min(counts), tl.min(masses)
    num_tied = tl.maximum(tl.sum(tl.where(second, counts, 0)) - count, 1)
    weight = (tl.sum(tl.where(second, masses, 0.0)) - mass) / num_tied
    return count, mass, num_tied, weight


@triton.jit
def _cut(row, n, temperature, largest, lowest, high, top_k, top_p, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Where top_k and top_p end: the ordered bits of the last logit kept, and how many of its ties are kept."""
    infinity = top_p * 0 + float("inf")
    low = high * 0 + LEAST_BITS
    low = _last_kept(row, n, temperature, largest, lowest, low, high, top_k, infinity, TILE, WIDTH)
    count, mass, num_tied, weight = _at(row, n, temperature, largest, lowest, low, TILE, WIDTH)
    mass += weight * tl.minimum(top_k - count, num_tied)
    # top_p = 1 keeps everything, also what is lost in the rounding of the sum.
    wanted = tl.where(top_p < 1.0, top_p * mass, infinity)
    low = _last_kept(row, n, temperature, largest, lowest, low, high, top_k, wanted, TILE, WIDTH)
    count, mass, num_tied, weight = _at(row, n, temperature, largest, lowest, low, TILE, WIDTH)
    # A tie is kept while what stands before it, lower ids among them, is short of both limits.
    enough = tl.where(weight > 0, tl.ceil((wanted - mass) / weight), infinity)
    return low, tl.minimum(top_k - count, tl.minimum(enough, n * 1.0).to(tl.int64))


@triton.jit
def _sample(
    out, logits, settings, uniforms, n, TILE: tl.constexpr, SEARCH_TILE: tl.constexpr, WIDTH: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row, setting = logits + index * n, settings + index * 4
    asked = tl.load(setting).to(tl.float32)
    temperature = tl.where(asked == 0.0, 1.0, asked)
    best = tl.full([TILE], NO_KEY, tl.int64)
    for start in range(0, n, TILE):
        column = start + tl.arange(0, TILE)
        best = tl.maximum(best, _keys(_scaled(row, column, n, temperature), column, n))
    key = tl.max(best)
    chosen, high = n - 1 - (key & 0xFFFFFFFF), key >> 32
    largest = tl.minimum(tl.load(row + chosen) / temperature, MAX_LOGIT)
    if largest == float("-inf"):
        chosen = chosen * 0 - 1
    elif asked != 0.0:
        lowest = largest + tl.load(setting + 1).to(tl.float32)
        top_k, top_p = tl.load(setting + 2).to(tl.int64), tl.load(setting + 3)
        last, ties = high * 0 + LEAST_BITS, high * 0 + n
        if (top_k < n) | (top_p < 1.0):
            last, ties = _cut(row, n, temperature, largest, lowest, high, top_k, top_p, SEARCH_TILE, WIDTH)
        uniform = tl.load(uniforms + index)
        chosen = _draw(row, n, temperature, largest, lowest, last, ties, uniform, TILE)
    tl.store(out + index, chosen)


@triton.jit
def _kept_weights(row, start, n, temperature, largest, lowest, last, ties, seen, TILE: tl.constexpr):
    """Weights of a tile, 0 for what is cut; `seen` ties stand before it. Returns them and the ties in it."""
    column = start + tl.arange(0, TILE)
    value = _scaled(row, column, n, temperature)
    bits = _ordered_bits(value).to(tl.int64)
    tied = (bits == last).to(tl.int64)
    kept = (bits > last) | ((tied == 1) & (seen + tl.cumsum(tied) <= ties))
    return tl.where(kept, _weights(value, largest, lowest), 0.0), tl.sum(tied)


@triton.jit
def _draw(row, n, temperature, largest, lowest, last, ties, uniform, TILE: tl.constexpr):
    """Inverse transform sampling among what is kept, in the order of ids."""
    total, seen = uniform * 0, ties * 0
    for start in range(0, n, TILE):
        weight, tied = _kept_weights(row, start, n, temperature, largest, lowest, last, ties, seen, TILE)
        total = tl.max(total + tl.cumsum(weight))
        seen += tied
    target = uniform * total
    running, seen, chosen = uniform * 0, ties * 0, ties * 0 + n
    for start in range(0, n, TILE):
        weight, tied = _kept_weights(row, start, n, temperature, largest, lowest, last, ties, seen, TILE)
        cumulative = running + tl.cumsum(weight)
        column = (start + tl.arange(0, TILE)).to(tl.int64)
        chosen = tl.minimum(chosen, tl.min(tl.where((cumulative > target) & (weight > 0), column, n)))
        running = tl.max(cumulative)
        seen += tied
    return tl.where(chosen < n, chosen, -1)


@triton.jit
def _philox(out, seeds, positions, count, TILE: tl.constexpr):
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = index < count
    seed = tl.load(seeds + index, mask=inside, other=0).to(tl.uint64)
    position = tl.load(positions + index, mask=inside, other=0).to(tl.uint64)
    low: tl.constexpr = 0xFFFFFFFF
    key0, key1 = seed & low, seed >> 32
    c0, c1 = position & low, position >> 32
    c2, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (second >> 32) ^ c1 ^ key0, (first >> 32) ^ c3 ^ key1
        c1, c3 = second & low, first & low
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    bits = (c0 << 20) | (c1 >> 12)
    tl.store(out + index, bits.to(tl.int64).to(tl.float64) * 2.220446049250313e-16, mask=inside)


@triton.jit
def _logprobs(ids, logprobs, ranks, logits, chosen, n, num_top, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * n
    token = tl.load(chosen + index)
    token_key = (_ordered_bits(tl.load(row + token)).to(tl.int64) << 32) + (n - 1 - token)
    best, rank = tl.full([TILE], NO_KEY, tl.int64), tl.zeros([TILE], tl.int64)
    for start in range(0, n, TILE):
        column = start + tl.arange(0, TILE)
        key = _keys(tl.load(row + column, mask=column < n, other=float("-inf")), column, n)
        best = tl.maximum(best, key)
        rank += (key > token_key).to(tl.int64)
    key = tl.max(best)
    largest = tl.load(row + (n - 1 - (key & 0xFFFFFFFF)))
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, n, TILE):
        column = start + tl.arange(0, TILE)
        total += tl.exp(tl.load(row + column, mask=column < n, other=float("-inf")) - largest)
    norm = largest + tl.log(tl.sum(total))
    place = index * (num_top + 1)
    tl.store(ranks + index, tl.sum(rank) + 1)
    tl.store(ids + place, token)
    tl.store(logprobs + place, tl.load(row + token) - norm)
    for top in range(num_top):
        found = n - 1 - (key & 0xFFFFFFFF)
        tl.store(ids + place + 1 + top, found)
        tl.store(logprobs + place + 1 + top, tl.load(row + found) - norm)
        best = tl.full([TILE], NO_KEY, tl.int64)
        for start in range(0, n, TILE):
            column = start + tl.arange(0, TILE)
            other = _keys(tl.load(row + column, mask=column < n, other=float("-inf")), column, n)
            best = tl.maximum(best, tl.where(other < key, other, NO_KEY))
        key = tl.max(best)


def non_finite_rows(logits: Tensor) -> Tensor:
    """See `ops.non_finite_rows`."""
    out = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    if len(logits):
        _non_finite[(len(logits),)](out, logits, logits.shape[1], TILE=TILE)
    return out


def apply_penalties(logits: Tensor, indices: Tensor, repetition: Tensor, subtracted: Tensor) -> None:
    """See `ops.apply_penalties`; indices are made by the sampler and not looked at again."""
    if len(indices):
        grid = (triton.cdiv(len(indices), 256),)
        _penalise[grid](logits, indices, repetition, subtracted, len(indices), TILE=256)


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """See `ops.philox_uniform`."""
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if len(seeds):
        _philox[(triton.cdiv(len(seeds), 128),)](out, seeds, positions, len(seeds), TILE=128)
    return out


def sample_tokens(logits: Tensor, settings: Tensor, uniforms: Tensor) -> Tensor:
    """See `ops.sample_tokens`."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        _sample[(len(logits),)](
            out, logits, settings, uniforms, logits.shape[1], TILE=TILE, SEARCH_TILE=512, WIDTH=8, num_warps=8
        )
    return out


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.token_logprobs`."""
    if num_top > MAX_TOP:
        return reference_sampling.token_logprobs(logits, chosen, num_top)
    shape, device = (len(logits), 1 + num_top), logits.device
    ids = torch.empty(shape, dtype=torch.int64, device=device)
    logprobs = torch.empty(shape, dtype=torch.float32, device=device)
    ranks = torch.empty(len(logits), dtype=torch.int64, device=device)
    if len(logits):
        _logprobs[(len(logits),)](ids, logprobs, ranks, logits, chosen, logits.shape[1], num_top, TILE=TILE)
    return ids, logprobs, ranks
