"""Activation functions by their names in config.json.

Invariant: the tables hold the names that `quire.models.families.fields` lets through, and those that families give.
"""

from collections.abc import Callable
from functools import partial
from statistics import NormalDist

from torch import Tensor

from quire.kernels import ops, reference
from quire.kernels.linear import Ending, QuantizedRows

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
"""Those in which a packed product can end; the last is of one part."""

GATED_FP8: dict[str, Callable[[Tensor], QuantizedRows]] = {
    "silu": ops.silu_and_mul_fp8,
    "gelu": partial(ops.gelu_and_mul_fp8, approximate="none"),
    "gelu_new": partial(ops.gelu_and_mul_fp8, approximate="tanh"),
    "gelu_pytorch_tanh": partial(ops.gelu_and_mul_fp8, approximate="tanh"),
}
"""The same for a linear layer in fp8."""


def _relu2(x: Tensor) -> Tensor:
    """ReLU, squared (So et al., 2021, arXiv:2109.08668)."""
    positive = ops.activate(x, function="relu")
    return positive * positive


def gaussian_top(sparsity: float) -> Activation:
    """What is above the quantile `sparsity` of each row, less that, and 0 below, were a row's elements normal.

    Statistical top-k (Gemma 3n, 2025; Bui et al., 2025, arXiv:2506.06644): [T, I] -> [T, I].
    """
    deviations = NormalDist().inv_cdf(sparsity)

    def kept(x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        spread = (x - mean).square().mean(-1, keepdim=True).sqrt()
        return ops.activate(x - (mean + deviations * spread), function="relu")

    return kept


PLAIN: dict[str, Activation] = {
    "relu": partial(ops.activate, function="relu"),
    "relu2": _relu2,
    "tanh": partial(ops.activate, function="tanh"),
    "silu": partial(ops.activate, function="silu"),
    "gelu": partial(ops.activate, function="gelu"),
    "gelu_new": partial(ops.activate, function="gelu_tanh"),
    "gelu_fast": partial(ops.activate, function="gelu_tanh"),
    "gelu_pytorch_tanh": partial(ops.activate, function="gelu_tanh"),
}
"""Element by element: [T, I] -> [T, I]."""
