"""Adapters of a table of which rows are looked up.

Shapes: T tokens, V rows of the table, H their size, S slots, R ranks.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.lora import LoraStacks


class TableAdapters:
    """Low-rank additions to the rows of a table [V, H].

    Args:
        stacks: of the matrix [H, V] by which a table multiplies the one-hot row of a token: its `a` is looked up, too.
    """

    def __init__(self, stacks: LoraStacks) -> None:
        slots, _, self._num_rows, ranks = stacks.a.shape
        self._a = stacks.a.view(slots * self._num_rows, ranks)
        # What was looked up has been shrunk already.
        same = torch.eye(ranks, dtype=stacks.a.dtype, device=stacks.a.device)
        self._expand = replace(stacks, a=same.repeat(slots, 1, 1, 1))

    def add(self, rows: Tensor, ids: Tensor, adapter_rows: Tensor) -> None:
        """Add to rows [T, H], in place, what adapters make of their tokens: ids [T] in [0, V).

        adapter_rows [T] int32 as of `ops.lora_linear`.
        """
        shrunk = ops.embedding(ids + adapter_rows.clamp(min=0) * self._num_rows, self._a)
        ops.lora_linear(rows, shrunk.to(rows.dtype), adapter_rows, self._expand)
