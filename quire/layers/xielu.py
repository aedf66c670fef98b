"""xIELU (Huang and Schlag, 2024, arXiv:2411.13010), an activation with learned parameters.

Shapes: T tokens of the step, I intermediate size.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.base import Layer, parameter
from quire.layers.slot import Slot


class XIELU(Layer):
    """`beta * x`, plus `alpha_p * x ** 2` where x is positive and `alpha_n * (exp(x) - 1 - x)` where it is not.

    A checkpoint has what softplus makes alpha_p, and alpha_n less beta, of.
    """

    def __init__(self, *, dtype: torch.dtype, name: str = "") -> None:
        super().__init__(name)
        self.alpha_p = parameter(1, dtype=dtype)
        self.alpha_n = parameter(1, dtype=dtype)
        self.beta = parameter(dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, I]."""
        positive, negative = x.clamp(min=0.0), x.clamp(max=0.0)
        curved = self.alpha_p * positive * positive + self.alpha_n * (negative.expm1() - negative)
        return curved + self.beta * x

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield f"{names[0]}.alpha_p", Slot(self.alpha_p, "zeros", convert=_softplus)
        yield f"{names[0]}.alpha_n", Slot(self.alpha_n, "zeros", convert=_softplus)
        yield f"{names[0]}.beta", Slot(self.beta, "ones")

    def finish_loading(self) -> None:
        self.alpha_n.add_(self.beta)


def _softplus(stored: Tensor) -> Tensor:
    return F.softplus(stored.float())
