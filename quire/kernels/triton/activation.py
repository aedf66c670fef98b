"""Gated activations: `act(first half) * second half` of each row."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit
def _gate(out, x, row_stride, n, KIND: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < n
    gate = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + n + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu":
        gate = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh(y) = 1 - 2 / (e^2y + 1), which is right at both ends
        gate = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    tl.store(out + row * n + column, gate * up, mask=inside)


def _launch(x: Tensor, kind: str) -> Tensor:
    n = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if out.numel():
        flat = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        _gate[(len(flat), triton.cdiv(n, TILE))](out, flat, flat.stride(0), n, KIND=kind, TILE=TILE)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """See `ops.silu_and_mul`."""
    return _launch(x, "silu")


def gelu_and_mul(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """See `ops.gelu_and_mul`."""
    return _launch(x, "gelu" if approximate == "none" else "gelu_tanh")
