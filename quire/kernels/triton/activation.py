"""Activations of each element, and gated ones: `act(first half) * second half` of each row, as they are or in E4M3.

Invariant: an element's bits come from its own one or two numbers alone, and a row's scale from the row.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.linear import Function, QuantizedRows
from quire.kernels.triton.launch import next_power_of_2, num_warps
from quire.kernels.triton.quantize import empty_rows, store_quantized

TILE = 1024


@triton.jit
def activated(x, KIND: tl.constexpr):
    if KIND == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # a NaN stays one
    elif KIND == "relu2":
        x = tl.where(x < 0.0, 0.0, x)
        x = x * x
    elif KIND == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif KIND == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif KIND == "tanh":
        x = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh(y) = 1 - 2 / (e^2y + 1), which is right at both ends
        x = 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    return x


@triton.jit
def _elements(out, x, n, KIND: tl.constexpr, TILE: tl.constexpr):
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = tl.program_id(0).to(tl.int64) * n + column
    value = tl.load(x + place, mask=column < n, other=0.0).to(tl.float32)
    tl.store(out + place, activated(value, KIND), mask=column < n)


@triton.jit
def _gated(x, column, n, KIND: tl.constexpr):
    """Some columns of the row behind x, rounded to its dtype; 0 beyond n."""
    gate = tl.load(x + column, mask=column < n, other=0.0).to(tl.float32)
    up = tl.load(x + n + column, mask=column < n, other=0.0).to(tl.float32)
    return (activated(gate, KIND) * up).to(x.dtype.element_ty)


@triton.jit
def _gate(out, x, row_stride, n, KIND: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tl.store(out + row * n + column, _gated(x + row * row_stride, column, n, KIND), mask=column < n)


@triton.jit
def _gate_fp8(out, scales, x, row_stride, n, KIND: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    store_quantized(out, scales, row, column, n, _gated(x + row * row_stride, column, n, KIND))


def _launch(x: Tensor, kind: str) -> Tensor:
    n = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if out.numel():
        flat = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        _gate[(len(flat), triton.cdiv(n, TILE))](out, flat, flat.stride(0), n, KIND=kind, TILE=TILE)
    return out


def _launch_fp8(x: Tensor, kind: str) -> QuantizedRows:
    rows, n = len(x), x.shape[1] // 2
    out = empty_rows(x, n)
    if out.values.numel():
        tile = next_power_of_2(n)
        _gate_fp8[(rows,)](
            out.values, out.scales, x, x.stride(0), n, KIND=kind, TILE=tile, num_warps=num_warps(tile)
        )
    return out


def activate(x: Tensor, function: Function) -> Tensor:
    """See `ops.activate`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        n = x.shape[-1]
        _elements[(out.numel() // n, triton.cdiv(n, TILE))](out, x, n, KIND=function, TILE=TILE)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """See `ops.silu_and_mul`."""
    return _launch(x, "silu")


def silu_and_mul_fp8(x: Tensor) -> QuantizedRows:
    """See `ops.silu_and_mul_fp8`."""
    return _launch_fp8(x, "silu")


def gelu_and_mul(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """See `ops.gelu_and_mul`."""
    return _launch(x, _GELUS[approximate])


def gelu_and_mul_fp8(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> QuantizedRows:
    """See `ops.gelu_and_mul_fp8`."""
    return _launch_fp8(x, _GELUS[approximate])


_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
