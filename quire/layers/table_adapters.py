"""Adapters of a table of which rows are looked up.

Shapes: T tokens, V rows of the table, H their size, S slots, R ranks.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.kernels import ops
from quire.kernels.lora import LoraStacks
from quire.layers.table_share import looked_up_among


class TableAdapters:
    """Low-rank additions to the rows of a table [V, H].

    Args:
        stacks: of the matrix [H, V] by which a table multiplies the one-hot row of a token: its `a` is looked up, too.
        group: the ranks that share the table; None: this one has all of it.
        own: the tokens that this rank has.
    """

    def __init__(self, stacks: LoraStacks, group: Group | None = None, own: slice = slice(0, 0)) -> None:
        self._group, self._own = group, own
        slots, _, self._num_rows, ranks = stacks.a.shape
        self._a = stacks.a.view(slots * self._num_rows, ranks)
        # What was looked up has been shrunk already.
        same = torch.eye(ranks, dtype=stacks.a.dtype, device=stacks.a.device)
        self._expand = replace(stacks, a=same.repeat(slots, 1, 1, 1))

    def add(self, rows: Tensor, ids: Tensor, adapter_rows: Tensor) -> None:
        """Add to rows [T, H], in place, what adapters make of their tokens: ids [T] in [0, V).

        adapter_rows [T] int32 as of `ops.lora_linear`.
        """
        first = adapter_rows.clamp(min=0) * self._num_rows
        shrunk = looked_up_among(
            self._group, self._own, ids, lambda local: ops.embedding(local + first, self._a).to(rows.dtype)
        )
        ops.lora_linear(rows, shrunk, adapter_rows, self._expand)
