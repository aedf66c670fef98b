"""Log-softmax, ranks and the most likely tokens: a row is cut into pieces of fixed size, and the pieces are joined.

Invariant: where a row is cut follows from V alone, so the sums of a row have the same bits in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import reference_sampling
from quire.kernels.triton.launch import next_power_of_2
from quire.kernels.triton.token_order import NO_KEY, id_of, order_keys

PIECE = 4096
FEW_TOP = 5
MAX_TOP = 64
"""Most top tokens that are found one after the other; beyond, sorting is cheaper."""


@triton.jit(do_not_specialize=["num_top"])
def _read_pieces(largest, totals, ranks, top_keys, logits, chosen, n, num_top, PIECE: tl.constexpr):
    """Of each piece: its largest logit, its mass relative to that, tokens before the chosen one, its first tokens."""
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
    # Each in memory of its own: halves of one would begin at multiples of 16 bytes for some numbers of rows only.
    largest, totals = (torch.empty(num_rows, pieces, dtype=torch.float32, device=device) for _ in range(2))
    ranks = torch.empty(num_rows, pieces, dtype=torch.int64, device=device)
    top_keys = torch.empty(num_rows, pieces, num_top, dtype=torch.int64, device=device)
    _read_pieces[(num_rows, pieces)](
        largest, totals, ranks, top_keys, logits, chosen, n, num_top, PIECE=PIECE, num_warps=8
    )
    # Few sizes, because each is a kernel of its own to compile.
    keys = next_power_of_2(pieces * (FEW_TOP if num_top <= FEW_TOP else MAX_TOP))
    _join_pieces[(num_rows,)](
        ids, logprobs, out_ranks, largest, totals, ranks, top_keys, logits, chosen, n, pieces, num_top,
        PIECES=next_power_of_2(pieces), KEYS=keys,
    )  # fmt: skip
    return ids, logprobs, out_ranks
