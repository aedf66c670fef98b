"""Rows of activations in E4M3, each with a scale: by a pass of their own, or behind the kernel that makes them.

Invariant: a row's scale comes from that row alone, and a row that its own kernel quantises has the bits of one that was
stored, in the activations' dtype, and quantised afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats import FP8_MAX
from quire.kernels.linear import QuantizedRows
from quire.kernels.reference import FP8_MIN_SCALE
from quire.kernels.triton.launch import next_power_of_2, num_warps

_LARGEST = tl.constexpr(FP8_MAX)
_LEAST_SCALE = tl.constexpr(FP8_MIN_SCALE)


@triton.jit
def store_quantized(out, scales, row, column, n, value):
    """Put a row of n numbers of the activations' dtype, 0 beyond them, into `out` and its scale into `scales`."""
    value = value.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value)) / _LARGEST, _LEAST_SCALE)
    tl.store(scales + row, scale)
    tl.store(out + row * n + column, (value / scale).to(out.dtype.element_ty), mask=column < n)


@triton.jit
def _quantize(out, scales, x, row_stride, n, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    store_quantized(
        out, scales, row, column, n, tl.load(x + row * row_stride + column, mask=column < n, other=0.0)
    )


def empty_rows(like: Tensor, size: int) -> QuantizedRows:
    """Memory for as many rows as `like` [T, ...] has, of `size` each."""
    values = torch.empty(len(like), size, dtype=torch.float8_e4m3fn, device=like.device)
    return QuantizedRows(
        values, torch.empty(len(like), 1, dtype=torch.float32, device=like.device), like.dtype
    )


def quantize_rows(x: Tensor) -> QuantizedRows:
    """x [T, K], whose rows may lie apart, with a scale per row."""
    rows, size = x.shape
    out = empty_rows(x, size)
    if x.numel():
        tile = next_power_of_2(size)
        _quantize[(rows,)](
            out.values, out.scales, x, x.stride(0), size, TILE=tile, num_warps=num_warps(tile)
        )  # fmt: skip
    return out
