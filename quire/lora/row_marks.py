# SPDX-License-Identifier: Apache-2.0
"""Hashes of table rows, by which a rank recognizes rows of the model that another rank holds.

A mark is two sums of a row's numbers, as integers, times random factors, modulo 2**64 (J. Carter and M. Wegman, 1979):
two different rows have equal marks with probability 2**-64 or less.

Shapes: n rows of H numbers; marks int64 [n, 2].
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import ops
from quire.layers.embedding import VocabEmbedding
from quire.layers.slot import length

_CHUNK = 256  # rows multiplied at once


def marks_of(rows: Tensor) -> Tensor:
    """Map rows [n, H] to marks [n, 2] on the host; 0.0 and -0.0 are equal."""
    found = []
    for part in torch.split(rows, _CHUNK):
        numbers = (part.float().cpu() + 0.0).view(torch.int32).long()
        found.append(torch.stack([(numbers * own).sum(1) for own in _factors(rows.shape[1])], 1))
    return torch.cat(found) if found else torch.zeros(0, 2, dtype=torch.int64)


def table_marks(layer: VocabEmbedding) -> Tensor:
    """Return the marks of all rows [V, 2] of a sharded table, as stored; all ranks call this at once."""
    assert layer.group is not None, "rows of an unsharded table are compared directly"
    device = next(iter(layer.tensors().values())).device
    ids = torch.arange(length(layer.rows[0]), device=device)
    marks = torch.cat([marks_of(layer.rows_here(part)) for part in torch.split(ids, _CHUNK)])
    shown = F.pad(marks, (0, 0, 0, layer.share - len(marks)))
    return ops.all_gather(shown, layer.group, 0)[: layer.shape[0]]


@cache
def _factors(size: int) -> Tensor:
    """Return two random factors for each number of a row, equal on all ranks: [2, size] odd int64."""
    generator = torch.Generator().manual_seed(size)
    halves = torch.randint(0, 1 << 32, (2, 2, size), generator=generator, dtype=torch.int64)
    return (halves[0] << 32) | halves[1] | 1
