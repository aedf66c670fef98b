"""Adapters whose matrices are kept as integers of 8 bits, in half the memory of bfloat16.

Invariant: a rank of `a`, and one of `b` in each part, has one scale: products are made of the integers, and multiplied
by both scales in between, where there is a number for each rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.lora import LoraStacks

_LARGEST = 127


def read_as(kept: torch.dtype) -> torch.dtype:
    """What an adapter is put together in that will be kept so."""
    return torch.float32 if kept is torch.int8 else kept


def rounded(stacks: LoraStacks, kept: torch.dtype) -> LoraStacks:
    """Adapters as they are kept: as they were put together, or in integers, each to the nearest.

    S slots, P parts of N outputs, K inputs, R ranks: a [S, P, K, R] has a scale for each of [S, P, R], b [S, R, N] too.
    """
    if kept is not torch.int8:
        return stacks
    a, of_a = _integers(stacks.a, 2)
    scales, integers = stacks.scales * of_a.squeeze(2), []
    for part, columns in enumerate(stacks.columns()):
        own, of_b = _integers(stacks.b[:, :, columns], 2)
        scales[:, part] *= of_b.squeeze(2)
        integers.append(own)
    return replace(stacks, a=a, b=torch.cat(integers, 2), scales=scales)


def _integers(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Integers, and by what those along a dimension are multiplied; nothing at all is zeros."""
    largest = values.abs().amax(dim, keepdim=True) if values.shape[dim] else values.new_zeros(1)
    scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
    return (values / scales).round().to(torch.int8), scales
