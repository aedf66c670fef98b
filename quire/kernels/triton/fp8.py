"""FP8 linear layers (W8A8): weights and activations in E4M3, products by the vendor's scaled GEMM.

P. Micikevicius et al., "FP8 formats for deep learning" (2022). Activations are scaled per token, on the fly;
weights per output, or all by one number, once while loading.

Invariant: a scale comes from the row (or the weight) it belongs to alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import next_power_of_2, num_warps

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@triton.jit
def _quantize(out, scales, x, row_stride, n, limit, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < n
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    # The floor keeps the inverse of a row of zeros finite.
    scale = tl.maximum(tl.max(tl.abs(value)) / limit, 1e-12)
    tl.store(scales + row, scale)
    tl.store(out + row * n + column, (value / scale).to(out.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> E4M3 [M, K] and float32 scales [M, 1]."""
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    if out.numel():
        tile = next_power_of_2(x.shape[1])
        _quantize[(len(x),)](
            out, scales, x, x.stride(0), x.shape[1], FP8_MAX, TILE=tile, num_warps=num_warps(tile)
        )
    return out, scales


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K], E4M3 weight [N, K] with float32 scales [N] or [1] -> bfloat16 [M, N].

    K and N must be multiples of 16, which the scaled GEMM wants.
    """
    quantized, row_scales = quantize_rows(x)
    column_scales = scales.expand(len(weight)).contiguous().view(1, -1)
    out = torch._scaled_mm(
        quantized, weight.t(), scale_a=row_scales, scale_b=column_scales, out_dtype=torch.bfloat16
    )
    return out if bias is None else out + bias
