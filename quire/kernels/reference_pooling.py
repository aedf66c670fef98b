# SPDX-License-Identifier: Apache-2.0
"""Oracle of pooling over the tokens of texts.

Invariant: torch's `segment_reduce` processes each column of a segment from its first row to its last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.experts import SUM_DTYPE, TokenReduction

_COLUMNS = 128
"""Columns reduced at once, so that those of all tokens stay in the processor's cache."""


def accumulate(vectors: Tensor, x: Tensor, chunks: Tensor, /, reduction: TokenReduction) -> None:
    """Accumulate tokens of texts into one vector per text, in token order.

    vectors [S, H], float64 for sums and else float32, changed in place; x [T, H] of any float dtype. chunks int64 [4,
    R] has, for R different rows of `vectors`: the row, the index in x of its first token, that token's position in its
    text (0: nothing was accumulated before), and the number of tokens, at least one. An invalid chunk is an IndexError.
    """
    rows, firsts, starts, counts = chunks
    if not len(rows):
        return
    empty = float("-inf") if reduction == "max" else 0.0
    vectors[rows[starts == 0]] = empty
    places, positions = _tokens(firsts, starts, counts)
    order = _with_what_was(places, counts)
    for begin in range(0, x.shape[1], _COLUMNS):
        columns = slice(begin, begin + _COLUMNS)
        tokens = x[places, columns].to(SUM_DTYPE[reduction])
        if reduction == "weighted":
            tokens = tokens * (positions + 1)[:, None]
        found = torch.cat((vectors[rows, columns], tokens)).index_select(0, order)
        vectors[rows, columns] = torch.segment_reduce(
            found, "max" if reduction == "max" else "sum", lengths=counts + 1, axis=0, unsafe=True
        )


def _tokens(firsts: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index in the step and the position in the text of each token of the chunks, in order."""
    ends = counts.cumsum(0)
    offsets = torch.arange(int(ends[-1]), device=counts.device) - (ends - counts).repeat_interleave(counts)
    return firsts.repeat_interleave(counts) + offsets, starts.repeat_interleave(counts) + offsets


def _with_what_was(places: Tensor, counts: Tensor) -> Tensor:
    """Return indices into [previous vectors; tokens]: for each chunk its previous vector, if any, then its tokens."""
    num_chunks = len(counts)
    order = torch.empty(num_chunks + len(places), dtype=torch.int64, device=counts.device)
    ends = counts.cumsum(0)
    at = ends - counts + torch.arange(num_chunks, device=counts.device)
    is_token = torch.ones(len(order), dtype=torch.bool, device=counts.device)
    is_token[at] = False
    order[at] = torch.arange(num_chunks, device=counts.device)
    order[is_token] = torch.arange(len(places), device=counts.device) + num_chunks
    return order
