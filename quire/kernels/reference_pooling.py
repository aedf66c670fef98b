"""What texts' tokens add up to, in plain torch, on every device; the oracle of `ops.accumulate`.

torch's `segment_reduce` walks each column of a segment from its first row to its last.
"""

import torch
from torch import Tensor

from quire.kernels.pooling import SUM_DTYPE, Accumulated

_COLUMNS = 128
"""Numbers of a vector that are reduced at once, so that those of all tokens stay in the processor's cache."""


def accumulate(vectors: Tensor, x: Tensor, chunks: Tensor, reduction: Accumulated) -> None:
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
    """Of each token of the chunks, in order, its index in the step and its position in the text."""
    ends = counts.cumsum(0)
    offsets = torch.arange(int(ends[-1]), device=counts.device) - (ends - counts).repeat_interleave(counts)
    return firsts.repeat_interleave(counts) + offsets, starts.repeat_interleave(counts) + offsets


def _with_what_was(places: Tensor, counts: Tensor) -> Tensor:
    """Indices into [what was; tokens]: of each chunk what was made before, then its tokens."""
    num_chunks = len(counts)
    order = torch.empty(num_chunks + len(places), dtype=torch.int64, device=counts.device)
    ends = counts.cumsum(0)
    at = ends - counts + torch.arange(num_chunks, device=counts.device)
    is_token = torch.ones(len(order), dtype=torch.bool, device=counts.device)
    is_token[at] = False
    order[at] = torch.arange(num_chunks, device=counts.device)
    order[is_token] = torch.arange(len(places), device=counts.device) + num_chunks
    return order
