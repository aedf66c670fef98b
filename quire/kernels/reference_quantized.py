# SPDX-License-Identifier: Apache-2.0
"""Oracles of ops on quantized activations.

The ops in E4M3 are producers of inputs for fp8 weights only. Their results are bit-identical to `packed_linear`'s
quantization of the result of the op without the suffix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats import FP8_MAX
from quire.kernels.linear import PackedWeight, QuantizedRows, RowQuantization
from quire.kernels.reference import (
    ACTIVATION_MAX,
    fused_add_rms_norm,
    gelu_and_mul,
    packed_linear,
    quantize_rows,
    rms_norm,
    silu_and_mul,
)


def rms_norm_fp8(x: Tensor, weight: Tensor, /, eps: float) -> QuantizedRows:
    """`rms_norm` in E4M3: x [T, H]."""
    return quantize_rows(rms_norm(x, weight, eps))


def fused_add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, /, eps: float
) -> tuple[QuantizedRows, Tensor]:
    """`fused_add_rms_norm` with the norm in E4M3: x, residual [T, H]; the sum is of x's dtype."""
    normed, total = fused_add_rms_norm(x, residual, weight, eps)
    return quantize_rows(normed), total


def silu_and_mul_fp8(x: Tensor, /) -> QuantizedRows:
    """`silu_and_mul` in E4M3: x [T, 2 * I] -> [T, I]."""
    return quantize_rows(silu_and_mul(x))


def gelu_and_mul_fp8(x: Tensor, /, approximate: Literal["none", "tanh"] = "none") -> QuantizedRows:
    """`gelu_and_mul` in E4M3: x [T, 2 * I] -> [T, I]."""
    return quantize_rows(gelu_and_mul(x, approximate))


def round_rows(x: Tensor, /, rounding: RowQuantization) -> Tensor:
    """Quantize and dequantize x [..., K], keeping shape and dtype; computed in float32.

    Integer codes are q = `clamp(round(x / s + z), lowest, 127)`, dequantized to `(q - z) * s`; E4M3 codes are of `x /
    s`, at most 448. Without a given scale, each group of a row computes its own. If symmetric, s is the largest
    magnitude, at most `bound`, over half of the range of codes (448 for E4M3), and z is 0. Else s is the distance from
    the least value to the largest, 0 included, over that range, and z is lowest - least / s, rounded. A non-finite
    value then makes its group NaN.
    """
    size = x.shape[-1]
    group = max(min(rounding.group or size, size), 1)
    groups = torch.unflatten(F.pad(x.float(), (0, -size % group)), -1, (-1, group))
    top = FP8_MAX if rounding.codes == "e4m3" else ACTIVATION_MAX
    if rounding.scale is not None:
        scale = torch.tensor(rounding.scale, dtype=torch.float32, device=x.device)
        zero = torch.tensor(rounding.zero, dtype=torch.float32, device=x.device)
    else:
        scale, zero = _step_of(groups, rounding, top)
    if rounding.codes == "e4m3":
        codes = (groups / scale).clamp(-top, top).to(torch.float8_e4m3fn).float()
    else:
        codes = (groups / scale + zero).clamp(rounding.lowest, top).round() - zero
    return (codes * scale).flatten(-2)[..., :size].to(x.dtype)


def rounded_linear(
    x: Tensor, weight: PackedWeight, /, rounding: RowQuantization, bias: Tensor | None = None
) -> Tensor:
    """`packed_linear`, with precise weights, of `round_rows(x)`: float32 [..., K] -> [..., N].

    On a CPU, int8 with a scale per output is multiplied in integers if the rounding is to bytes; with a zero point it
    needs `code_sums`, and the zero point's part is subtracted from the sums before they are scaled. On any instruction
    set, sums of 64 products are exact, and a row's sums are exact while they fit into the 24 bits of a float32.
    """
    precise = replace(weight, scheme=replace(weight.scheme, fast=False))
    return packed_linear(round_rows(x, rounding), precise, bias)


def _step_of(groups: Tensor, rounding: RowQuantization, top: float) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points computed for groups [..., G, group], [..., G, 1]."""
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    is_finite = groups.isfinite().all(-1, keepdim=True)
    lowest = -top if rounding.codes == "e4m3" else rounding.lowest
    if rounding.symmetric:
        most = torch.maximum(high, -low)
        scale = (most if rounding.bound is None else most.clamp(max=rounding.bound)) / ((top - lowest) / 2)
    else:
        scale = (high - low) / (top - lowest)
    divisor = torch.where(scale == 0, 1.0, scale)
    zero = (
        torch.zeros_like(low) if rounding.symmetric else (lowest - low / divisor).clamp(lowest, top).round()
    )
    zero = torch.where(scale == 0, 0.0, zero)
    return torch.where(is_finite, divisor, torch.nan), torch.where(is_finite, zero, 0.0)
