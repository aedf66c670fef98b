"""Penalties for tokens that a row of tokens holds, counted where the row is.

Every token of a row is counted in a table over the vocabulary. Then every one of them takes out the count that it
finds; who finds one is the only one of its kind, and changes the logit.

Invariant: counts are integers, so no result depends on the order of the programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.token_order import MAX_LOGIT

TILE = 1024


@triton.jit
def _tokens(token_rows, row_stride, places, n, TILE: tl.constexpr):
    """Of a tile: where each token's count is, its id, whether it stands in the row, and whether it was generated."""
    user = tl.program_id(0).to(tl.int64)
    place = places + user * 4
    row, num_prompt, num_tokens = tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_tokens
    token = tl.load(token_rows + row * row_stride + column, mask=inside, other=0)
    return user * n + token, token, inside, column >= num_prompt


@triton.jit
def _count(counts, token_rows, row_stride, places, n, TILE: tl.constexpr):
    """Bit 0: the prompt has the token; the rest: how often it was generated."""
    entry, _, inside, is_generated = _tokens(token_rows, row_stride, places, n, TILE)
    one = tl.full([TILE], 1, tl.int32)
    tl.atomic_or(counts + entry, one, mask=inside & ~is_generated, sem="relaxed")
    tl.atomic_add(counts + entry, one + one, mask=inside & is_generated, sem="relaxed")


@triton.jit
def _penalise(logits, counts, token_rows, row_stride, places, factors, n, TILE: tl.constexpr):
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


def penalise_rows(logits: Tensor, token_rows: Tensor, places: Tensor, factors: Tensor, longest: int) -> None:
    """See `ops.penalise_rows`; places are made by the sampler and not looked at again."""
    if not len(places) or not longest:
        return
    n, grid = logits.shape[1], (len(places), triton.cdiv(longest, TILE))
    counts = torch.zeros(len(places), n, dtype=torch.int32, device=logits.device)
    rows = (token_rows, token_rows.stride(0), places)
    _count[grid](counts, *rows, n, TILE=TILE)
    _penalise[grid](logits, counts, *rows, factors, n, TILE=TILE)
