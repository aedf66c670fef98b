"""Activations rounded as checkpoints say, with every check."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.calls import call, empty
from quire.kernels.cpu.checks import check_on_cpu, say
from quire.kernels.rounding import RowRounding

_CODES = {"int8": 0, "e4m3": 1}
"""Those of `enum Codes` in csrc/cpu/round_rows.cpp."""


def round_rows(x: Tensor, rounding: RowRounding) -> Tensor:
    check_on_cpu("round_rows", "x", x)
    if x.dtype is not torch.float32 or not x.dim():
        raise ValueError(f"round_rows: x must be float32 [..., K]; it is {say(x)}")
    x = x.contiguous()
    out = empty(x, *x.shape)
    inputs = x.shape[-1]
    group = min(rounding.group or inputs, inputs)
    numbers = (float(rounding.lowest), rounding.bound or 0.0, rounding.scale or 0.0, rounding.zero)
    rows = x.numel() // max(inputs, 1)
    call(
        "round_rows",
        (out, x),
        rows,
        inputs,
        group,
        _CODES[rounding.codes],
        *numbers,
        int(not rounding.symmetric),
    )
    return out
