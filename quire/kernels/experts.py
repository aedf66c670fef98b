"""The weights of a layer's experts, as the kernels read them.

Invariant: each expert's matrices are packed by themselves, wherever they lie; what all have in common is checked once.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quire.kernels.linear import GatedActivation, PackedWeight


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """E gated MLPs: `gate_up` [2 I, H], gate above up and packed in halves, and `down` [H, I], of each expert.

    All have one activation. Biases are float32 [2 I] and [H] of each; empty where there are none.
    """

    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    gate_up_bias: tuple[Tensor, ...] = ()
    down_bias: tuple[Tensor, ...] = ()
    activation: GatedActivation = "silu_and_mul"
    native: Any = field(default=None, init=False, repr=False, compare=False)
    """Set by the kernels of a device once they have checked it."""

    def __len__(self) -> int:
        return len(self.gate_up)

    @property
    def layout(self) -> str:
        """That of all matrices."""
        return self.gate_up[0].layout
