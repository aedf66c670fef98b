# SPDX-License-Identifier: Apache-2.0
"""Expert weights and adapters as the kernels read them, and reductions of a text's tokens.

Invariant: each expert's weights are packed separately, at any address; their common properties are checked once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from quire.kernels.formats.two_level import narrowed
from quire.kernels.linear import GATED, FusedActivation, PackedWeight
from quire.kernels.low_rank import LowRankStacks

TokenReduction = Literal["sum", "weighted", "max"]
"""Reductions of a text's tokens: sum, sum with the n-th token weighted by n, and elementwise maximum."""

SUM_DTYPE: dict[TokenReduction, torch.dtype] = {
    "sum": torch.float64,
    "weighted": torch.float64,
    "max": torch.float32,
}


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of E MLPs: `gate_up` [2 I, H], gate above up and packed in halves, and `down` [H, I], of each expert.

    If the common activation has no gate, `gate_up` is up alone, [I, H]. Biases are float32, one number per output, and
    empty if there are none. Experts are numbered from `first`, of `total` in the layer if other ranks have some.
    """

    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    gate_up_bias: tuple[Tensor, ...] = ()
    down_bias: tuple[Tensor, ...] = ()
    activation: FusedActivation = "silu_and_mul"
    first: int = 0
    total: int = 0
    """0: all experts are here."""
    native: Any = field(default=None, init=False, repr=False, compare=False)
    """Kernels' own form, set by a device's kernels once they have checked the weights."""

    def __len__(self) -> int:
        return len(self.gate_up)

    @property
    def halves(self) -> int:
        """Number of parts of `gate_up`."""
        return 2 if self.activation in GATED else 1

    @property
    def numbers(self) -> range:
        """Numbers of the experts on this rank."""
        return range(self.first, self.first + len(self))

    @property
    def num_in_layer(self) -> int:
        """Number of experts in the layer."""
        return self.total or len(self)

    @property
    def layout(self) -> str:
        """Layout of all weights."""
        return self.gate_up[0].layout


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """Slots for the weights of E experts; an expert's S slots are adjacent.

    So adapter s of expert e uses slot e * S + s of its stacks. Gate and up are two parts.
    """

    gate_up: LowRankStacks
    down: LowRankStacks
    native: Any = field(default=None, init=False, repr=False, compare=False)
    """See `ExpertWeights.native`."""


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as one [E, ...]: a view if they are contiguous in memory, else a copy."""
    first, size = parts[0], parts[0].nbytes
    memory, begin = first.untyped_storage(), first.data_ptr()
    together = all(
        part.is_contiguous()
        and part.data_ptr() == begin + index * size
        and part.untyped_storage().data_ptr() == memory.data_ptr()
        for index, part in enumerate(parts)
    )
    if not together:
        return torch.stack([*parts])
    sizes, strides = (len(parts), *first.shape), (first.numel(), *first.stride())
    return torch.empty(0, dtype=first.dtype, device=first.device).set_(
        memory, first.storage_offset(), sizes, strides
    )


def with_scales_alike(weights: Sequence[PackedWeight]) -> tuple[PackedWeight, ...]:
    """Return the weights with float32 scales if their scale types differ: kernels read one type."""
    dtypes = {None if each.scales is None else each.scales.dtype for each in weights}
    if dtypes == {torch.float16, torch.float32}:
        return tuple(each.with_float32_scales() for each in weights)
    if dtypes == {torch.int8, torch.float32}:
        return tuple(narrowed(each, slice(0, each.inputs)) for each in weights)
    return tuple(weights)


def make_contiguous(parts: Sequence[Tensor]) -> None:
    """Move tensors of one shape into contiguous memory; each stays the same tensor object."""
    with torch.inference_mode(False), torch.no_grad():
        for part, place in zip(parts, torch.stack([*parts]), strict=True):
            part.data = place
