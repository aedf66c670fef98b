# SPDX-License-Identifier: Apache-2.0
"""Quantization of activation rows to E4M3, each with a scale, alone or fused, and FP8 linear layers (W8A8).

P. Micikevicius et al., "FP8 formats for deep learning" (2022). Activations have a scale per token, weights one per
output or one per tensor; matmuls run here or in the vendor's library.

Invariant: a row's scale depends on that row alone, and a fused quantization has the bits of storing the row in the
activations' dtype and quantizing it afterwards. The tile of `fp8_linear`, and the parts of a split k, follow from the
weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.formats import FP8_MAX
from quire.kernels.linear import PackedWeight, QuantizedRows
from quire.kernels.reference import FP8_MIN_SCALE
from quire.kernels.triton.launch import next_power_of_2, num_warps
from quire.kernels.triton.matmul import outputs_per_tile
from quire.kernels.triton.primitives import put, room_for_parts, split_k

CAPABILITY = (8, 9)
"""First NVIDIA compute capability with E4M3 matmuls."""
BLOCK_M = 64
PRECISE = tl.constexpr(128)
"""Products summed by tensor cores before a float32 accumulates them: Hopper keeps only 14 bits in sums of E4M3."""


def check_device(device: torch.device) -> None:
    """Check that a device multiplies fp8.

    Raises:
        ConfigError: it does not; the message names it.
    """
    if device.type == "cuda" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found < CAPABILITY:
            raise ConfigError(
                f"--quantization fp8 needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or later; "
                f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
            )


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    out, parts, arrived, x, row_scales, weight, scales, bias, rows, outputs, inputs, steps_per_part,
    parts_per_program, num_parts,
    HAS_BIAS: tl.constexpr, IN_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_used, output_used = row < rows, output < outputs
    x_start = x + row.to(tl.int64)[:, None] * inputs
    w_start = weight + output.to(tl.int64)[None, :] * inputs
    first_part = tl.program_id(2) * parts_per_program
    row_scale = tl.load(row_scales + row, mask=row_used, other=0.0)[:, None]
    scale = tl.load(scales + output, mask=output_used, other=0.0)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in range(first_part, first_part + parts_per_program):
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(part * steps_per_part, (part + 1) * steps_per_part):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            a = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
            b = tl.load(w_start + k[:, None], mask=output_used[None, :] & (k < inputs)[:, None], other=0.0)
            sums = tl.dot(a, b, sums, max_num_imprecise_acc=PRECISE)
        total += sums * row_scale * scale
    put(out, parts, arrived, total, bias, row, output, rows, outputs, num_parts, HAS_BIAS, IN_PARTS)


def fp8_linear(x: QuantizedRows, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply x [M, K] with an E4M3 weight [N, K] with float32 scales [N] -> [M, N] of `dtype`; batch-invariant."""
    (rows, inputs), outputs = x.shape, weight.outputs
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if out.numel():
        block_n = outputs_per_tile(outputs)
        block_k = 256 if block_n == 64 else 128
        num_parts, steps_per_part = split_k(triton.cdiv(outputs, block_n), triton.cdiv(inputs, block_k))
        # Many rows occupy a device without parts, and programs that loop over all of them compute the same sums.
        together = num_parts if rows > BLOCK_M else 1
        grid = (triton.cdiv(outputs, block_n), triton.cdiv(rows, BLOCK_M), num_parts // together)
        _multiply[grid](
            out, *room_for_parts(out, weight, grid), x.values, x.scales, weight.data, weight.scales, bias,
            rows, outputs, inputs, steps_per_part, together, grid[2],
            HAS_BIAS=bias is not None, IN_PARTS=grid[2] > 1, BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=4, num_stages=3, enable_fp_fusion=False,  # a stored partial sum cannot be fused
        )  # fmt: skip
    return out


def vendor_takes(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Return whether the vendor's scaled GEMM is faster and supports the shape, for a result no more precise than
    bfloat16, its output with per-row scales.

    With few enough rows to fill one tile here it is slower on an H100, and it refuses deep weights with a bias.
    """
    return rows > BLOCK_M and outputs % 16 == 0 and inputs % 16 == 0 and dtype is not torch.float32


def vendor_linear(x: QuantizedRows, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `fp8_linear` in x's dtype by `torch._scaled_mm`, which rounds to bfloat16 on the way."""
    if not x.shape[0]:
        return torch.empty(0, len(weight), dtype=x.dtype, device=x.device)
    out: Tensor = torch._scaled_mm(
        x.values,
        weight.t(),
        scale_a=x.scales,
        scale_b=scales.view(1, -1),
        bias=None if bias is None else bias.bfloat16(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out.to(x.dtype)


_LARGEST = tl.constexpr(FP8_MAX)
_LEAST_SCALE = tl.constexpr(FP8_MIN_SCALE)


@triton.jit
def store_quantized(out, scales, row, column, n, value):
    """Store a row of n numbers of the activations' dtype, 0 beyond them, in `out` and its scale in `scales`."""
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
    """Return memory for as many rows as `like` [T, ...] has, of `size` each."""
    values = torch.empty(len(like), size, dtype=torch.float8_e4m3fn, device=like.device)
    return QuantizedRows(
        values, torch.empty(len(like), 1, dtype=torch.float32, device=like.device), like.dtype
    )


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Quantize x [T, K], whose rows may be strided, with a scale per row."""
    rows, size = x.shape
    out = empty_rows(x, size)
    if x.numel():
        tile = next_power_of_2(size)
        _quantize[(rows,)](
            out.values, out.scales, x, x.stride(0), size, TILE=tile, num_warps=num_warps(tile)
        )  # fmt: skip
    return out
