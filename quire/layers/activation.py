"""Activation functions by their names in config.json.

Invariant: the tables hold the names that `quire.models.families.fields` lets through, and those that families give.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from quire.kernels import ops, reference
from quire.kernels.linear import Ending, Function, QuantizedRows

Activation = Callable[[Tensor], Tensor]

GATED: dict[str, Activation] = {
    "clamped_swiglu": reference.clamped_swiglu,
    "silu": ops.silu_and_mul,
    "gelu": partial(ops.gelu_and_mul, approximate="none"),
    "gelu_new": partial(ops.gelu_and_mul, approximate="tanh"),
    "gelu_pytorch_tanh": partial(ops.gelu_and_mul, approximate="tanh"),
}
"""act(first half) * second half: [T, 2 * I] -> [T, I]."""

FUSED: dict[str, Ending] = {"clamped_swiglu": "clamped_swiglu", "silu": "silu_and_mul", "relu2": "relu2"}
"""Those in which a packed product with gates, or an expert's, can end; the last is of one part."""

GATED_FP8: dict[str, Callable[[Tensor], QuantizedRows]] = {
    "silu": ops.silu_and_mul_fp8,
    "gelu": partial(ops.gelu_and_mul_fp8, approximate="none"),
    "gelu_new": partial(ops.gelu_and_mul_fp8, approximate="tanh"),
    "gelu_pytorch_tanh": partial(ops.gelu_and_mul_fp8, approximate="tanh"),
}
"""The same for a linear layer in fp8."""


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
"""Element by element, which is what any `Linear` may end in."""

PLAIN: dict[str, Activation] = {
    name: partial(ops.activate, function=function) for name, function in FUNCTIONS.items()
}
"""The same, alone: [T, I] -> [T, I]."""
