"""Activations rounded as checkpoints say, with every check."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.cpu.calls import NOTHING, call, empty
from quire.kernels.cpu.checks import check_on_cpu, say
from quire.kernels.cpu.linear import integer_linear, packed_linear
from quire.kernels.linear import PackedWeight
from quire.kernels.rounding import RowRounding

_CODES = {"int8": 0, "e4m3": 1}
"""Those of `enum Codes` in csrc/cpu/round_rows.cpp."""


def round_rows(x: Tensor, rounding: RowRounding) -> Tensor:
    check_on_cpu("round_rows", "x", x)
    if x.dtype is not torch.float32 or not x.dim():
        raise ValueError(f"round_rows: x must be float32 [..., K]; it is {say(x)}")
    x = x.contiguous()
    out = empty(x, *x.shape)
    _round(out, NOTHING, x, rounding)
    return out


def rounded_linear(
    x: Tensor, weight: PackedWeight, rounding: RowRounding, bias: Tensor | None = None
) -> Tensor:
    kept = weight.scheme
    is_plain = kept.kind == "int8" and not kept.group_size and kept.symmetric
    if not is_plain or not rounding.makes_bytes:
        precise = replace(weight, scheme=replace(kept, fast=False)) if kept.fast else weight
        return packed_linear(round_rows(x, rounding), precise, bias)
    check_on_cpu("rounded_linear", "x", x)
    if x.dtype is not torch.float32 or not x.dim() or x.shape[-1] != weight.inputs:
        raise ValueError(f"rounded_linear: x must be float32 [..., {weight.inputs}]; it is {say(x)}")
    x = x.contiguous()
    codes, scales = empty(x, *x.shape), empty(x, *x.shape[:-1], 1)
    _round(codes, scales, x, rounding)
    out = integer_linear(codes, weight) * scales
    return out if bias is None else out + bias


def _round(out: Tensor, scales: Tensor, x: Tensor, rounding: RowRounding) -> None:
    """To floats, or, with scales, to codes."""
    inputs = x.shape[-1]
    group = min(rounding.group or inputs, inputs)
    numbers = (float(rounding.lowest), rounding.bound or 0.0, rounding.scale or 0.0, rounding.zero)
    rows = x.numel() // max(inputs, 1)
    call(
        "round_rows",
        (out, scales, x),
        rows,
        inputs,
        group,
        _CODES[rounding.codes],
        *numbers,
        int(not rounding.symmetric),
    )
