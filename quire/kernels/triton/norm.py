"""RMSNorm and LayerNorm, one program per row.

Invariant: a row is reduced by one program in a tree that depends on its length alone.

B. Zhang and R. Sennrich, "Root mean square layer normalization" (2019); J. Ba et al., "Layer normalization" (2016).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.linear import QuantizedRows
from quire.kernels.triton.launch import next_power_of_2, num_warps, rows_of
from quire.kernels.triton.quantize import empty_rows, store_quantized


@triton.jit
def normed(value, weight, column, inside, n, eps):
    """A row of n float32 numbers, 0 where not `inside`, by its root mean square and the weight."""
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
    # The norm is of the sum as it is stored.
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
    centred = tl.where(inside, value - tl.sum(value) / n, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred) / n + eps)
    result = centred * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n + column, result, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, None, x, weight, eps)
    return out


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> QuantizedRows:
    """See `ops.rms_norm_fp8`."""
    out = empty_rows(x, x.shape[1])
    _launch(out.values, out.scales, x, weight, eps)
    return out


def _launch(out: Tensor, scales: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> None:
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
    """Returns the sum of x and the residual."""
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
