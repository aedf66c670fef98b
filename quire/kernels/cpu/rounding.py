"""Activations rounded as checkpoints say, with every check."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.cpu.calls import NOTHING, call, check_alignment, empty
from quire.kernels.cpu.checks import check_array, check_on_cpu, say
from quire.kernels.cpu.linear import BLOCK_ROWS, SCRATCH, checked, packed_linear
from quire.kernels.linear import PANEL, PackedWeight
from quire.kernels.rounding import RowRounding

_CODES = {"int8": 0, "e4m3": 1}
"""Those of `enum Codes` in csrc/cpu/rounding.h."""


def round_rows(x: Tensor, rounding: RowRounding) -> Tensor:
    check_on_cpu("round_rows", "x", x)
    if x.dtype is not torch.float32 or not x.dim():
        raise ValueError(f"round_rows: x must be float32 [..., K]; it is {say(x)}")
    x = x.contiguous()
    out, inputs = empty(x, *x.shape), x.shape[-1]
    group, rows = min(rounding.group or inputs, inputs), x.numel() // max(inputs, 1)
    call("round_rows", (out, x), rows, inputs, group, _CODES[rounding.codes], *_numbers(rounding))
    return out


def rounded_linear(
    x: Tensor, weight: PackedWeight, rounding: RowRounding, bias: Tensor | None = None
) -> Tensor:
    check_on_cpu("rounded_linear", "x", x)
    if x.dtype is not torch.float32 or not x.dim() or x.shape[-1] != weight.inputs:
        raise ValueError(f"rounded_linear: x must be float32 [..., {weight.inputs}]; it is {say(x)}")
    (data, scales, _), sizes, _, padded = weight.native or checked("rounded_linear", weight)
    if bias is not None:
        check_array("rounded_linear", "bias", bias, torch.float32, (weight.outputs,))
    kept, sums = weight.scheme, weight.code_sums if rounding.shifts else NOTHING
    if sums is None or not kept.is_plain_int8 or not rounding.makes_bytes:
        given = (NOTHING, x, data, scales, NOTHING, NOTHING if bias is None else bias, NOTHING)
        check_alignment("rounded_linear", given)
        precise = replace(weight, scheme=replace(kept, fast=False)) if kept.fast else weight
        return packed_linear(round_rows(x, rounding), precise, bias)
    if rounding.shifts:
        check_array("rounded_linear", "code_sums", sums, torch.float32, (len(data), PANEL))
    x, rows = x.contiguous(), x.numel() // weight.inputs
    out = empty(x, *x.shape[:-1], weight.outputs)
    scratch = SCRATCH.of(BLOCK_ROWS + min(rows, BLOCK_ROWS) * (padded + 1))
    tensors = (out, x, data, scales, sums, NOTHING if bias is None else bias, scratch)
    call("rounded_linear", tensors, scratch.nbytes, rows, *sizes, *_numbers(rounding))
    return out


def _numbers(rounding: RowRounding) -> tuple[float, float, float, float, int]:
    """The least integer, bound, scale and zero point, 0 where there is none, and whether steps that are found shift."""
    given = (float(rounding.lowest), rounding.bound or 0.0, rounding.scale or 0.0, rounding.zero)
    return *given, int(not rounding.symmetric)
