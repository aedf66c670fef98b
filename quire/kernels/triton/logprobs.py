# SPDX-License-Identifier: Apache-2.0
"""Log-softmax, ranks and top tokens; checks and masks of logits; and penalties.

A row is split into pieces of fixed size, which follow from V alone, so its sums have the same bits in every batch.
Penalties count a row's tokens in a table over the vocabulary. Then each token's program takes out the count that it
finds; the only one that finds a nonzero count changes the logit.

Invariant: no result depends on how rows are split over programs, or on their order: counts are integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference_sampling
from quire.kernels.triton.launch import next_power_of_2
from quire.kernels.triton.primitives import MAX_LOGIT, NO_KEY, id_of, order_keys

TILE = 8192


@triton.jit
def _look(largest, logits, n, TILE: tl.constexpr):
    """Write the largest logit of each tile of a row: +inf if one is NaN."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    value = tl.load(logits + row * n + column, mask=column < n, other=float("-inf"))
    value = tl.where(value != value, float("inf"), value)
    tl.store(largest + row * tl.num_programs(1) + tile, tl.max(value))


@triton.jit
def _judge(out, largest, num_tiles, TILES: tl.constexpr):
    """Write whether a row has a NaN or +inf, or nothing but -inf."""
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


PENALTIES_TILE = 1024


@triton.jit
def _tokens(token_rows, row_stride, places, n, TILE: tl.constexpr):
    """Return for a tile the address of each token's count, its id, whether it is in the row, and whether it was
    generated.
    """
    user = tl.program_id(0).to(tl.int64)
    place = places + user * 4
    row, num_prompt, num_tokens = tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_tokens
    token = tl.load(token_rows + row * row_stride + column, mask=inside, other=0)
    return user * n + token, token, inside, column >= num_prompt


@triton.jit
def _count(counts, token_rows, row_stride, places, n, TILE: tl.constexpr):
    """Count tokens: bit 0 if the prompt has the token; the other bits how often it was generated."""
    entry, _, inside, is_generated = _tokens(token_rows, row_stride, places, n, TILE)
    one = tl.full([TILE], 1, tl.int32)
    tl.atomic_or(counts + entry, one, mask=inside & ~is_generated, sem="relaxed")
    tl.atomic_add(counts + entry, one + one, mask=inside & is_generated, sem="relaxed")


@triton.jit
def _penalize(logits, counts, token_rows, row_stride, places, factors, n, TILE: tl.constexpr):
    entry, token, inside, _ = _tokens(token_rows, row_stride, places, n, TILE)
    count = tl.atomic_xchg(counts + entry, tl.zeros([TILE], tl.int32), mask=inside, sem="relaxed")
    is_first = inside & (count != 0)
    user = tl.program_id(0).to(tl.int64)
    repetition, frequency = tl.load(factors + user * 3), tl.load(factors + user * 3 + 1)
    presence, num_generated = tl.load(factors + user * 3 + 2), count >> 1
    place = logits + tl.load(places + user * 4) * n + token
    value = tl.load(place, mask=is_first, other=0.0).to(tl.float64)
    value = tl.where(value > 0, value / repetition, value * repetition)
    value -= frequency * num_generated.to(tl.float64) + tl.where(num_generated > 0, presence, 0.0)
    tl.store(place, tl.minimum(value, MAX_LOGIT).to(tl.float32), mask=is_first)


def penalize_rows(logits: Tensor, token_rows: Tensor, places: Tensor, factors: Tensor, longest: int) -> None:
    """See `ops.penalize_rows`; places come from the sampler and are not checked."""
    if not len(places) or not longest:
        return
    n, grid = logits.shape[1], (len(places), triton.cdiv(longest, PENALTIES_TILE))
    counts = torch.zeros(len(places), n, dtype=torch.int32, device=logits.device)
    rows = (token_rows, token_rows.stride(0), places)
    _count[grid](counts, *rows, n, TILE=PENALTIES_TILE)
    _penalize[grid](logits, counts, *rows, factors, n, TILE=PENALTIES_TILE)


PIECE = 4096
FEW_TOP = 5
MAX_TOP = 64
"""Largest number of top tokens found one by one; beyond it, sorting is cheaper."""


@triton.jit(do_not_specialize=["num_top"])
def _read_pieces(largest, totals, ranks, top_keys, logits, chosen, n, num_top, PIECE: tl.constexpr):
    """Write for each piece its largest logit, its relative mass, the tokens before the chosen one, and its first
    tokens.
    """
    index, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, place = logits + index * n, index * pieces + piece
    token = tl.load(chosen + index)
    column = piece * PIECE + tl.arange(0, PIECE)
    value = tl.load(row + column, mask=column < n, other=float("-inf"))
    key = order_keys(value, column, n)
    best = tl.max(value)
    tl.store(largest + place, best)
    tl.store(totals + place, tl.sum(tl.exp(value - best)))
    tl.store(ranks + place, tl.sum((key > order_keys(tl.load(row + token), token, n)).to(tl.int64)))
    first = tl.max(key)
    for top in range(num_top):
        tl.store(top_keys + place * num_top + top, first)
        first = tl.max(tl.where(key < first, key, NO_KEY))


@triton.jit(do_not_specialize=["num_top"])
def _join_pieces(
    ids,
    logprobs,
    out_ranks,
    largest,
    totals,
    ranks,
    top_keys,
    logits,
    chosen,
    n,
    pieces,
    num_top,
    PIECES: tl.constexpr,
    KEYS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row, place = logits + index * n, index * (num_top + 1)
    piece, key_index = tl.arange(0, PIECES), tl.arange(0, KEYS)
    inside = piece < pieces
    piece_best = tl.load(largest + index * pieces + piece, mask=inside, other=float("-inf"))
    best = tl.max(piece_best)
    total = tl.load(totals + index * pieces + piece, mask=inside, other=0.0) * tl.exp(piece_best - best)
    norm = best + tl.log(tl.sum(total))
    rank = tl.sum(tl.load(ranks + index * pieces + piece, mask=inside, other=0))
    token = tl.load(chosen + index)
    tl.store(out_ranks + index, rank + 1)
    tl.store(ids + place, token)
    tl.store(logprobs + place, tl.load(row + token) - norm)
    num_keys = pieces * num_top
    keys = tl.load(top_keys + index * num_keys + key_index, mask=key_index < num_keys, other=NO_KEY)
    first = tl.max(keys)
    for top in range(num_top):
        found = id_of(first, n)
        tl.store(ids + place + 1 + top, found)
        tl.store(logprobs + place + 1 + top, tl.load(row + found) - norm)
        first = tl.max(tl.where(keys < first, keys, NO_KEY))


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.token_logprobs`."""
    if num_top > MAX_TOP:
        return reference_sampling.token_logprobs(logits, chosen, num_top)
    (num_rows, n), device = logits.shape, logits.device
    ids = torch.empty(num_rows, 1 + num_top, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_rows, 1 + num_top, dtype=torch.float32, device=device)
    out_ranks = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return ids, logprobs, out_ranks
    pieces = triton.cdiv(n, PIECE)
    # Each in memory of its own: halves of one would be 16-byte aligned for some numbers of rows only.
    largest, totals = (torch.empty(num_rows, pieces, dtype=torch.float32, device=device) for _ in range(2))
    ranks = torch.empty(num_rows, pieces, dtype=torch.int64, device=device)
    top_keys = torch.empty(num_rows, pieces, num_top, dtype=torch.int64, device=device)
    _read_pieces[(num_rows, pieces)](
        largest, totals, ranks, top_keys, logits, chosen, n, num_top, PIECE=PIECE, num_warps=8
    )
    # Few sizes, because each compiles its own kernel.
    keys = next_power_of_2(pieces * (FEW_TOP if num_top <= FEW_TOP else MAX_TOP))
    _join_pieces[(num_rows,)](
        ids, logprobs, out_ranks, largest, totals, ranks, top_keys, logits, chosen, n, pieces, num_top,
        PIECES=next_power_of_2(pieces), KEYS=keys,
    )  # fmt: skip
    return ids, logprobs, out_ranks
