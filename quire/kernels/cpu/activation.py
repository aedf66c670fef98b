"""Activations, plain and gated, as functions on tensors, with every check."""

from typing import Literal, get_args

from torch import Tensor

from quire.kernels.cpu.calls import call, empty
from quire.kernels.cpu.checks import dtype_code, say
from quire.kernels.linear import Ending, Function

ACTIVATIONS: dict[Ending | None, int] = {
    None: 0,
    "silu_and_mul": 1,
    "clamped_swiglu": 2,
    "relu2": 3,
    "relu": 4,
    "silu": 5,
    "gelu": 6,
    "gelu_tanh": 7,
    "sigmoid": 8,
    "tanh": 9,
}
"""The codes of `enum Activation` in csrc/cpu/activations.h."""
_FUNCTIONS: dict[Function, int] = {function: ACTIVATIONS[function] for function in get_args(Function)}


def activate(x: Tensor, function: Function) -> Tensor:
    dtype = dtype_code("activate", "x", x)
    code = _FUNCTIONS.get(function)
    if code is None:
        raise ValueError(f"activate: function must be one of {', '.join(_FUNCTIONS)}; it is {function!r}")
    x = x.contiguous()
    out = empty(x, *x.shape)
    call("activate", (out, x), x.numel(), code, dtype)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    return _activate_and_mul("silu_and_mul", x)


def gelu_and_mul(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu_and_mul: approximate must be 'none' or 'tanh'; it is {approximate!r}")
    return _activate_and_mul("gelu_and_mul", x, int(approximate == "tanh"))


def _activate_and_mul(op: str, x: Tensor, *options: int) -> Tensor:
    code = dtype_code(op, "x", x)
    *outer, width = x.shape
    if width % 2 or not width:
        raise ValueError(f"{op}: the last dimension must be even and positive; x is {say(x)}")
    x, size = x.contiguous(), width // 2
    out = empty(x, *outer, size)
    call(op, (out, x), out.numel() // size, size, *options, code)
    return out
