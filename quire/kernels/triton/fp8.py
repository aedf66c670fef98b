"""FP8 linear layers (W8A8): weights and activations in E4M3, multiplied here or by the vendor's library.

P. Micikevicius et al., "FP8 formats for deep learning" (2022). Activations come with a scale per token, weights with
one per output or one for all.

Invariant: the tile of `fp8_linear` follows from the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.linear import QuantizedRows
from quire.kernels.triton.matmul import outputs_per_tile

CAPABILITY = (8, 9)
"""The first NVIDIA architecture that multiplies E4M3."""
BLOCK_M = 64


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
    out, x, row_scales, weight, scales, bias, rows, outputs, inputs,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_used, output_used = row < rows, output < outputs
    x_start = x + row.to(tl.int64)[:, None] * inputs
    w_start = weight + output.to(tl.int64)[None, :] * inputs
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x_start + k[None, :], mask=row_used[:, None] & (k < inputs)[None, :], other=0.0)
        b = tl.load(w_start + k[:, None], mask=output_used[None, :] & (k < inputs)[:, None], other=0.0)
        sums = tl.dot(a, b, sums)
    sums *= tl.load(row_scales + row, mask=row_used, other=0.0)[:, None]
    sums *= tl.load(scales + output, mask=output_used, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output_used, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=row_used[:, None] & output_used[None, :])


def fp8_linear(
    x: QuantizedRows, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x [M, K], E4M3 weight [N, K] with float32 scales [N] -> [M, N] of that dtype; a row's bits in every batch."""
    (rows, inputs), outputs = x.shape, len(weight)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if out.numel():
        block_n = outputs_per_tile(outputs)
        _multiply[(triton.cdiv(outputs, block_n), triton.cdiv(rows, BLOCK_M))](
            out, x.values, x.scales, weight, scales, bias, rows, outputs, inputs,
            HAS_BIAS=bias is not None, BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=256 if block_n == 64 else 128,
            num_warps=4, num_stages=3,
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
