# SPDX-License-Identifier: Apache-2.0
"""Norms, activations, embedding lookup and token accumulation, as functions on tensors, with all checks."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from quire.kernels.cpu.calls import NOTHING, call, check_index, describe, dtype_code, empty
from quire.kernels.cpu.library import DTYPE_CODES
from quire.kernels.experts import SUM_DTYPE, TokenReduction
from quire.kernels.linear import Function, FusedActivation

ACTIVATIONS: dict[FusedActivation | None, int] = {
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
"""Codes of `enum Activation` in csrc/cpu/activations.h."""
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
        raise ValueError(f"{op}: the last dimension must be even and positive; x is {describe(x)}")
    x, size = x.contiguous(), width // 2
    out = empty(x, *outer, size)
    call(op, (out, x), out.numel() // size, size, *options, code)
    return out


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    check_index("embedding", "ids", ids, ids.shape[0] if ids.dim() else 0)
    dtype_code("embedding", "weight", weight)
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(f"embedding: weight must be contiguous [V, H]; it is {describe(weight)}")
    (tokens,), (rows, size) = ids.shape, weight.shape
    out = empty(weight, tokens, size)
    refused = call("embedding", (out, ids, weight), tokens, rows, size * weight.itemsize)
    if refused:
        raise IndexError(f"embedding: {refused} ids are outside the table of {rows} rows")
    return out


_CODES: dict[TokenReduction, int] = {"sum": 0, "weighted": 1, "max": 2}


def accumulate(vectors: Tensor, x: Tensor, chunks: Tensor, reduction: TokenReduction) -> None:
    code, wanted = dtype_code("accumulate", "x", x), SUM_DTYPE[reduction]
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"accumulate: x must be rows [T, H]; it is {describe(x)}")
    (tokens, size), requests = x.shape, chunks.shape[-1]
    if vectors.shape[1:] != (size,) or vectors.dtype is not wanted or not _is_plain(vectors):
        raise ValueError(
            f"accumulate: vectors must be contiguous {wanted} [S, {size}]; they are {describe(vectors)}"
        )
    if chunks.shape != (4, requests) or chunks.dtype is not torch.int64 or not _is_plain(chunks):
        raise ValueError(f"accumulate: chunks must be contiguous int64 [4, R]; they are {describe(chunks)}")
    numbers = (requests, tokens, size, x.stride(0), len(vectors), _CODES[reduction], code)
    refused = call("accumulate", (vectors, x, chunks), *numbers)
    if refused:
        raise IndexError(
            f"accumulate: chunk {refused - 1} is none of {tokens} tokens and {len(vectors)} rows"
        )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.is_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    code = dtype_code("rms_norm", "x", x)
    weight_code = check_weight("rms_norm", "weight", x, weight)
    x, *layout = _rows(x)
    out = empty(x, *x.shape)
    call("rms_norm", (out, x, weight), *layout, x.shape[-1], eps, code, weight_code)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    code = dtype_code("fused_add_rms_norm", "x", x)
    weight_code = check_weight("fused_add_rms_norm", "weight", x, weight)
    x, residual = _alike("fused_add_rms_norm", x, residual)
    out, total, size = empty(x, *x.shape), empty(x, *x.shape), x.shape[-1]
    tensors = (out, total, x, residual, weight)
    call("fused_add_rms_norm", tensors, x.numel() // size, size, eps, code, weight_code)
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    code, weight_code = dtype_code("layer_norm", "x", x), _check_both("layer_norm", x, weight, bias)
    x, *layout = _rows(x)
    out = empty(x, *x.shape)
    tensors = (out, x, weight, NOTHING if bias is None else bias)
    call("layer_norm", tensors, *layout, x.shape[-1], eps, code, weight_code)
    return out


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    name = "fused_add_layer_norm"
    code, weight_code = dtype_code(name, "x", x), _check_both(name, x, weight, bias)
    x, residual = _alike(name, x, residual)
    out, total, size = empty(x, *x.shape), empty(x, *x.shape), x.shape[-1]
    tensors = (out, total, x, residual, weight, NOTHING if bias is None else bias)
    call(name, tensors, x.numel() // size, size, eps, code, weight_code)
    return out, total


def _alike(op: str, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return both, contiguous."""
    if residual.shape != x.shape or residual.dtype is not x.dtype or not residual.is_cpu:
        raise ValueError(f"{op}: residual is {describe(residual)} but x is {describe(x)}")
    return x.contiguous(), residual.contiguous()


def _check_both(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """Return the code of the dtype of weight and bias."""
    code = check_weight(op, "weight", x, weight)
    if bias is not None and check_weight(op, "bias", x, bias) != code:
        raise TypeError(f"{op}: bias must be {weight.dtype} as weight is; it is {bias.dtype}")
    return code


def check_weight(op: str, name: str, x: Tensor, weight: Tensor) -> int:
    """Return the code of the weight's dtype."""
    if weight.shape != x.shape[-1:] or not weight.numel() or not weight.is_contiguous() or not weight.is_cpu:
        raise ValueError(
            f"{op}: {name} must be contiguous of shape [{x.shape[-1]}]; it is {describe(weight)}"
        )
    if weight.dtype is not x.dtype and weight.dtype is not torch.float32:
        raise TypeError(f"{op}: {name} must be {x.dtype} or float32; it is {weight.dtype}")
    return DTYPE_CODES[weight.dtype]


def _rows(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """Return x as rows with two strides: (x, outer, inner, outer stride, inner stride); a copy if necessary."""
    if x.is_contiguous():
        size = x.shape[-1]
        return x, x.numel() // size, 1, size, 0
    if x.dim() == 3 and x.stride(-1) == 1:
        return x, x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2 and x.stride(-1) == 1:
        return x, x.shape[0], 1, x.stride(0), 0
    x = x.contiguous()
    return x, x.numel() // x.shape[-1], 1, x.shape[-1], 0
