"""FP8 linear layers (W8A8): weights and activations in E4M3, multiplied here or by the vendor's library.

P. Micikevicius et al., "FP8 formats for deep learning" (2022). Activations come with a scale per token, weights with
one per output or one for all.

Invariant: the tile of `fp8_linear`, and the parts into which k is cut, follow from the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.linear import PackedWeight, QuantizedRows
from quire.kernels.triton.matmul import outputs_per_tile
from quire.kernels.triton.parts import cut, put, room_for_parts

CAPABILITY = (8, 9)
"""The first NVIDIA architecture that multiplies E4M3."""
BLOCK_M = 64
PRECISE = tl.constexpr(128)
"""Products that tensor cores add up, of whose sums of E4M3 Hopper's keep 14 bits, before a float32 takes them over."""


def check_device(device: torch.device) -> None:
    """Refuse a device that does not multiply fp8.

    Raises:
        ConfigError: names it.
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
    """x [M, K], E4M3 weight [N, K] with float32 scales [N] -> [M, N] of that dtype; a row's bits in every batch."""
    (rows, inputs), outputs = x.shape, weight.outputs
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if out.numel():
        block_n = outputs_per_tile(outputs)
        block_k = 256 if block_n == 64 else 128
        num_parts, steps_per_part = cut(triton.cdiv(outputs, block_n), triton.cdiv(inputs, block_k))
        # Many rows keep a device busy without parts, and programs that walk through all of them add up the same.
        together = num_parts if rows > BLOCK_M else 1
        grid = (triton.cdiv(outputs, block_n), triton.cdiv(rows, BLOCK_M), num_parts // together)
        _multiply[grid](
            out, *room_for_parts(out, weight, grid), x.values, x.scales, weight.data, weight.scales, bias,
            rows, outputs, inputs, steps_per_part, together, grid[2],
            HAS_BIAS=bias is not None, IN_PARTS=grid[2] > 1, BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=4, num_stages=3, enable_fp_fusion=False,  # a sum that is stored on the way cannot be fused
        )  # fmt: skip
    return out


def vendor_takes(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether the vendor's scaled GEMM is better, and multiplies with such a weight, for a result that need not be more
    precise than the bfloat16 which it makes of rows with scales of their own.

    Of so few rows as fill a tile here, it is slower on an H100, and of deep matrices with a bias it refuses them.
    """
    return rows > BLOCK_M and outputs % 16 == 0 and inputs % 16 == 0 and dtype is not torch.float32


def vendor_linear(x: QuantizedRows, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """`fp8_linear` in x's dtype by `torch._scaled_mm`; the result is rounded to bfloat16 on the way."""
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
