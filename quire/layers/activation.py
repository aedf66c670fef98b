# SPDX-License-Identifier: Apache-2.0
"""Activation functions by their names in config.json, and xIELU (Huang and Schlag, 2024, arXiv:2411.13010).

Shapes: T tokens of the step, I intermediate size.
Invariant: the tables hold the names that `quire.models.families.fields` accepts, and those that families set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import ops, reference
from quire.kernels.linear import Function, FusedActivation, QuantizedRows
from quire.layers.base import Layer, parameter
from quire.layers.slot import Slot


class XIELU(Layer):
    """`beta * x`, plus `alpha_p * x ** 2` where x is positive and `alpha_n * (exp(x) - 1 - x)` where it is not.

    The checkpoint stores the inverse softplus of alpha_p, and of alpha_n - beta.
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


Activation = Callable[[Tensor], Tensor]

GATED: dict[str, Activation] = {
    "clamped_swiglu": reference.clamped_swiglu,
    "silu": ops.silu_and_mul,
    "gelu": partial(ops.gelu_and_mul, approximate="none"),
    "gelu_new": partial(ops.gelu_and_mul, approximate="tanh"),
    "gelu_pytorch_tanh": partial(ops.gelu_and_mul, approximate="tanh"),
}
"""act(first half) * second half: [T, 2 * I] -> [T, I]."""

FUSED: dict[str, FusedActivation] = {
    "clamped_swiglu": "clamped_swiglu",
    "silu": "silu_and_mul",
    "relu2": "relu2",
}
"""Activations that a packed matmul with gates, or an expert's, can fuse; relu2 takes one part."""

GATED_FP8: dict[str, Callable[[Tensor], QuantizedRows]] = {
    "silu": ops.silu_and_mul_fp8,
    "gelu": partial(ops.gelu_and_mul_fp8, approximate="none"),
    "gelu_new": partial(ops.gelu_and_mul_fp8, approximate="tanh"),
    "gelu_pytorch_tanh": partial(ops.gelu_and_mul_fp8, approximate="tanh"),
}
"""Variants of `GATED` with fp8 output."""


FUNCTIONS: dict[str, Function] = {
    "relu": "relu",
    "relu2": "relu2",
    "tanh": "tanh",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Elementwise activations, which any `Linear` can fuse."""

PLAIN: dict[str, Activation] = {
    name: partial(ops.activate, function=function) for name, function in FUNCTIONS.items()
}
"""Elementwise activations as functions: [T, I] -> [T, I]."""
