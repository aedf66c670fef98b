"""The weights of a layer's experts, as the kernels read them.

Invariant: each expert's matrices are packed by themselves, wherever they lie; what all have in common is checked once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.kernels.linear import GATED, Ending, PackedWeight
from quire.kernels.lora import LoraStacks


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """E MLPs: `gate_up` [2 I, H], gate above up and packed in halves, and `down` [H, I], of each expert.

    Where the activation, which all share, wants no gate, `gate_up` is up alone, [I, H]. Biases are float32, of as many
    numbers as a matrix has rows; empty where there are none. They are those from number `first` on, of `total` in the
    layer if other ranks have others.
    """

    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    gate_up_bias: tuple[Tensor, ...] = ()
    down_bias: tuple[Tensor, ...] = ()
    activation: Ending = "silu_and_mul"
    first: int = 0
    total: int = 0
    """0: these are all."""
    native: Any = field(default=None, init=False, repr=False, compare=False)
    """Set by the kernels of a device once they have checked it."""

    def __len__(self) -> int:
        return len(self.gate_up)

    @property
    def halves(self) -> int:
        """Parts that `gate_up` has."""
        return 2 if self.activation in GATED else 1

    @property
    def numbers(self) -> range:
        """Those of the experts that are here."""
        return range(self.first, self.first + len(self))

    @property
    def num_in_layer(self) -> int:
        """What choices are among."""
        return self.total or len(self)

    @property
    def layout(self) -> str:
        """That of all matrices."""
        return self.gate_up[0].layout


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """Slots for low-rank additions to the matrices of E experts; those of an expert are neighbours, S of each.

    So adapter s adds to a product of expert e what slot e * S + s of its stacks says. Gate and up are two parts.
    """

    gate_up: LoraStacks
    down: LoraStacks
    native: Any = field(default=None, init=False, repr=False, compare=False)
    """As that of `ExpertWeights`."""


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one [E, ...]: where they lie one behind the other a view of them, else a copy."""
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
    """The same matrices, all with scales in float32 where some have them in float16: kernels read one type."""
    if {None if each.scales is None else each.scales.dtype for each in weights} == {
        torch.float16,
        torch.float32,
    }:
        return tuple(each.with_float32_scales() for each in weights)
    return tuple(weights)


def lay_together(parts: Sequence[Tensor]) -> None:
    """Move tensors of one shape into one memory, one behind the other; each stays the tensor that it is."""
    with torch.inference_mode(False), torch.no_grad():
        for part, place in zip(parts, torch.stack([*parts]), strict=True):
            part.data = place
