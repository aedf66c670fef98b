# SPDX-License-Identifier: Apache-2.0
"""Norms, activations (plain, gated, and gated to E4M3) and table lookup.

B. Zhang and R. Sennrich, "Root mean square layer normalization" (2019); J. Ba et al., "Layer normalization" (2016).

Invariant: a row is reduced by one program in a tree that depends on its length alone. An activation's bits depend on
its one or two inputs alone, and a row's scale on the row.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.linear import Function, QuantizedRows
from quire.kernels.triton.launch import next_power_of_2, num_warps, rows_of
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
    """Return some columns of the gated row, rounded to its dtype; 0 beyond n."""
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


@triton.jit
def _gather(out, ids, table, row_stride, num_rows, n, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(ids + token)
    # An id outside the table reads as 0: the runner has validated the input, and out-of-bounds memory is never read.
    inside = tl.where((row >= 0) & (row < num_rows), column < n, False)
    value = tl.load(table + row * row_stride + column, mask=inside, other=0.0)
    tl.store(out + token * n + column, value, mask=column < n)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See `ops.embedding`."""
    out = torch.empty(len(ids), weight.shape[1], dtype=weight.dtype, device=weight.device)
    if out.numel():
        grid = (len(ids), triton.cdiv(weight.shape[1], TILE))
        _gather[grid](out, ids, weight, weight.stride(0), *weight.shape, TILE=TILE)
    return out


@triton.jit
def normed(value, weight, column, inside, n, eps):
    """Return a row of n float32 numbers, 0 where not `inside`, RMS-normed and weighted."""
    scale = 1.0 / tl.sqrt(tl.sum(value * value) / n + eps)
    return value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["inner"])
def _rms_norm(
    out, scales, x, weight, inner, outer_stride, inner_stride, n, eps, QUANTIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < n
    start = row // inner * outer_stride + row % inner * inner_stride
    value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    result = normed(value, weight, column, inside, n, eps)
    if QUANTIZE:
        store_quantized(out, scales, row, column, n, result.to(x.dtype.element_ty))
    else:
        tl.store(out + row * n + column, result, mask=inside)


@triton.jit
def _add_rms_norm(
    out, scales, total, x, residual, weight, x_stride, residual_stride, n, eps,
    QUANTIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < n
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    # The norm is computed from the sum as stored.
    stored = value.to(total.dtype.element_ty)
    tl.store(total + row * n + column, stored, mask=inside)
    value = stored.to(tl.float32)
    result = normed(value, weight, column, inside, n, eps)
    if QUANTIZE:
        store_quantized(out, scales, row, column, n, result.to(x.dtype.element_ty))
    else:
        tl.store(out + row * n + column, result, mask=inside)


@triton.jit(do_not_specialize=["inner"])
def _layer_norm(
    out,
    x,
    weight,
    bias,
    inner,
    outer_stride,
    inner_stride,
    n,
    eps,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < n
    start = row // inner * outer_stride + row % inner * inner_stride
    value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, value - tl.sum(value) / n, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered) / n + eps)
    result = centered * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n + column, result, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _elementwise_launch(out, None, x, weight, eps)
    return out


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> QuantizedRows:
    """See `ops.rms_norm_fp8`."""
    out = empty_rows(x, x.shape[1])
    _elementwise_launch(out.values, out.scales, x, weight, eps)
    return out


def _elementwise_launch(out: Tensor, scales: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> None:
    outer, inner, outer_stride, inner_stride = rows_of(x)
    if out.numel():
        tile = next_power_of_2(x.shape[-1])
        _rms_norm[(outer * inner,)](
            out, scales, x, weight, inner, outer_stride, inner_stride, x.shape[-1], eps,
            QUANTIZE=scales is not None, TILE=tile, num_warps=num_warps(tile),
        )  # fmt: skip


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.fused_add_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, _launch_add(out, None, x, residual, weight, eps)


def fused_add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    """See `ops.fused_add_rms_norm_fp8`."""
    out = empty_rows(x, x.shape[1])
    return out, _launch_add(out.values, out.scales, x, residual, weight, eps)


def _launch_add(
    out: Tensor, scales: Tensor | None, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Return the sum of x and the residual."""
    total, n = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    if out.numel():
        tile = next_power_of_2(n)
        flat, added = x.flatten(0, -2), residual.flatten(0, -2)
        _add_rms_norm[(len(flat),)](
            out, scales, total, flat, added, weight, flat.stride(0), added.stride(0), n, eps,
            QUANTIZE=scales is not None, TILE=tile, num_warps=num_warps(tile),
        )  # fmt: skip
    return total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `ops.layer_norm`."""
    outer, inner, outer_stride, inner_stride = rows_of(x)
    out, n = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    if out.numel():
        tile = next_power_of_2(n)
        _layer_norm[(outer * inner,)](
            out, x, weight, bias, inner, outer_stride, inner_stride, n, eps, HAS_BIAS=bias is not None, TILE=tile,
            num_warps=num_warps(tile),
        )  # fmt: skip
    return out


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `ops.fused_add_layer_norm`; the sum is torch's."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total
