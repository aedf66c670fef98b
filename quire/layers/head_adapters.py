"""Adapters of a matrix that heads have one of each.

Shapes: T tokens, H heads, K and N input and output features of a head, S slots.
"""

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.lora import LoraStacks


class HeadAdapters:
    """Low-rank additions to what heads make.

    Args:
        stacks: of matrices [N, K]; slot s has those from s * H on, one for each head.
    """

    def __init__(self, stacks: LoraStacks, num_heads: int) -> None:
        self._stacks = stacks
        factors = stacks.input_factors
        self._factors = None if factors is None else factors.view(-1, num_heads, factors.shape[1])
        self._heads = torch.arange(num_heads, dtype=torch.int32, device=stacks.a.device)

    def scaled(self, x: Tensor, adapter_rows: Tensor) -> Tensor:
        """What adapters make of x [T, H, K] before any product: DoRA's where a checkpoint has matrices [K, N].

        adapter_rows [T] int32 as of `ops.lora_linear`.
        """
        if self._factors is None:
            return x
        factors = self._factors[adapter_rows.clamp(min=0)]
        return x * torch.where(adapter_rows[:, None, None] < 0, 1.0, factors).to(x.dtype)

    def add(self, out: Tensor, x: Tensor, adapter_rows: Tensor) -> None:
        """Add to out [T, H, N], in place, what adapters make of x [T, H, K].

        adapter_rows [T] int32 as of `ops.lora_linear`.
        """
        first = adapter_rows[:, None] * len(self._heads)
        of_heads = torch.where(first < 0, -1, first + self._heads).flatten()
        ops.lora_linear(out.flatten(0, 1), x.flatten(0, 1), of_heads, self._stacks)
