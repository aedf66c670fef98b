# SPDX-License-Identifier: Apache-2.0
"""Packed-linear kernels, and rounding of activations as checkpoints specify, as Python functions with every check.

Invariant: as in `checks`; the metadata of a `PackedWeight` is checked against its memory before C++ uses it.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.cpu import library
from quire.kernels.cpu.arena import huge_page_memory, on_huge_pages
from quire.kernels.cpu.calls import (
    NOTHING,
    call,
    check_alignment,
    check_array,
    check_index,
    check_on_cpu,
    describe,
    dtype_code,
    empty,
    recording,
)
from quire.kernels.cpu.elementwise import ACTIVATIONS
from quire.kernels.formats import STREAM_CODES, format_of
from quire.kernels.linear import (
    GATED,
    PANEL,
    FusedActivation,
    NativeWeight,
    PackedWeight,
    RowQuantization,
    WeightScheme,
    num_panels,
)

_NO_STREAM = -1
"""Type number of an absent stream: `kNoStream` of csrc/cpu/scaling.h."""
BLOCK_ROWS = 192
"""Rows that a kernel packs at a time, as in csrc/cpu/linear.h; it checks the resulting size of scratch memory."""


def packed_layout() -> str:
    """Return the name of the layout that `pack_weight` makes here; equal names mean equal bytes."""
    loaded = library.loaded()
    assert loaded is not None, "there are kernels"
    return f"{library.WEIGHT_LAYOUT} by {loaded.isa}, ABI {library.ABI_VERSION}"


def pack_weight(weight: Tensor, scheme: WeightScheme, halves: int = 1) -> PackedWeight:
    code = dtype_code("pack_weight", "weight", weight)
    if weight.dim() != 2 or not weight.numel() or halves not in (1, 2) or weight.shape[0] % halves:
        raise ValueError(f"pack_weight: weight must be [N, K] in {halves} halves; it is {describe(weight)}")
    if not _rounded_here(scheme):
        return format_of(scheme).pack(weight, scheme, halves, "panels").moved(on_huge_pages)
    packed = _empty(weight, scheme, halves)
    if not _pack_into(packed, weight, code):
        return packed
    # Some scale, or step of scales, does not fit float16; all scales of a weight have one dtype.
    if scheme.two_level:
        return format_of(scheme).pack(weight, scheme, halves, "panels").moved(on_huge_pages)
    assert packed.scales is not None, "scales that do not fit"
    wide = huge_page_memory(weight, *packed.scales.shape, dtype=torch.float32)
    packed = replace(packed, scales=wide)
    _pack_into(packed, weight, code)
    return packed


def _pack_into(packed: PackedWeight, weight: Tensor, code: int) -> int:
    """Pack a weight into memory; return the number of scales that do not fit; with any, the result is unusable."""
    matrix, sizes, (_, layout), _ = checked("pack_weight", packed)
    return call("pack_weight", (*matrix, weight.contiguous()), *sizes, code, layout)


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: FusedActivation | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dtype_code("packed_linear", "x", x)
    matrix, sizes, kernel_format, padded = weight.native or checked("packed_linear", weight)
    outputs, inputs, halves, *_ = sizes
    *lead, columns = x.shape
    if columns != inputs:
        raise ValueError(f"packed_linear: x must have {inputs} columns; it is {describe(x)}")
    if bias is not None:
        check_array("packed_linear", "bias", bias, torch.float32, (outputs,))
    if activation is not None:
        if activation not in ACTIVATIONS or (activation in GATED) != (halves == 2):
            raise ValueError(f"packed_linear: activation {activation!r} with a weight in {halves} parts")
        outputs //= halves
    wide = x.float().contiguous()
    rows = wide.numel() // inputs
    out = empty(wide, *lead, outputs)
    scratch = SCRATCH.of(BLOCK_ROWS + min(rows, BLOCK_ROWS) * (padded + 1))
    tensors = (out, wide, *matrix, NOTHING if bias is None else bias, scratch)
    call("packed_linear", tensors, scratch.nbytes, rows, *sizes, ACTIVATIONS[activation], *kernel_format)
    wanted = dtype or x.dtype
    return out if wanted is torch.float32 else out.to(wanted)


def packed_embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    matrix, sizes, (_, layout), _ = weight.native or checked("packed_embedding", weight)
    check_index("packed_embedding", "ids", ids, ids.shape[0] if ids.dim() else 0)
    count = ids.shape[0]
    out = empty(ids, count, weight.inputs, dtype=torch.float32)
    refused = call("packed_embedding", (out, ids, *matrix), count, *sizes, layout)
    if refused:
        raise IndexError(f"packed_embedding: {refused} ids are outside the table of {weight.outputs} rows")
    return out


class _Scratch(threading.local):
    """Scratch memory of a thread's kernels; kept, because a new allocation costs a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._kept = torch.empty(0)

    def of(self, num_floats: int) -> Tensor:
        """Return memory for at least `num_floats` float32."""
        if recording.dry is not None:
            return recording.dry(num_floats)
        if recording.listener is not None:  # a recording outlives the kept memory
            return torch.empty(num_floats, dtype=torch.float32)
        if self._kept.numel() < num_floats:
            self._kept = torch.empty(num_floats, dtype=torch.float32)
        return self._kept


SCRATCH = _Scratch()
"""Scratch memory of all matmuls; a thread runs one at a time."""


def checked(op: str, weight: PackedWeight) -> NativeWeight:
    """Check a packed weight and return its kernel arguments, kept on it: a packed weight never changes."""
    kept, scheme, dtype = format_of(weight.scheme), weight.scheme, weight.data.dtype
    kept.check(op, weight)
    scales, zeros = (
        _NO_STREAM if part is None else STREAM_CODES[part.dtype] for part in (weight.scales, weight.zeros)
    )
    sizes = (weight.outputs, weight.inputs, weight.halves, kept.group(scheme, dtype), scales, zeros)
    padded = kept.padded(scheme, dtype, weight.inputs)
    native = NativeWeight(_tensors(weight), sizes, (int(scheme.fast), kept.code(dtype)), padded)
    object.__setattr__(weight, "native", native)
    return native


def _rounded_here(scheme: WeightScheme) -> bool:
    """Return whether C++ quantizes such weights; others are rare and left to torch."""
    return scheme.kind in ("float", "int4") or (scheme.kind == "int8" and scheme.symmetric)


def _tensors(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    scales, zeros = (NOTHING if part is None else part for part in (weight.scales, weight.zeros))
    return weight.data, scales, zeros


def _empty(weight: Tensor, scheme: WeightScheme, halves: int) -> PackedWeight:
    outputs, inputs = weight.shape
    parts = format_of(scheme).parts(scheme, weight.dtype, num_panels(outputs, halves), inputs)
    tensors = [huge_page_memory(weight, *part.shape, dtype=part.dtype) for part in parts]
    scales, zeros = (*tensors[1:], None, None)[:2]
    return PackedWeight(scheme, tensors[0], scales, zeros, outputs, inputs, halves)


_CODES = {"int8": 0, "e4m3": 1}
"""Values of `enum Codes` in csrc/cpu/rounding.h."""


def round_rows(x: Tensor, rounding: RowQuantization) -> Tensor:
    check_on_cpu("round_rows", "x", x)
    if x.dtype is not torch.float32 or not x.dim():
        raise ValueError(f"round_rows: x must be float32 [..., K]; it is {describe(x)}")
    x = x.contiguous()
    out, inputs = empty(x, *x.shape), x.shape[-1]
    group, rows = min(rounding.group or inputs, inputs), x.numel() // max(inputs, 1)
    call("round_rows", (out, x), rows, inputs, group, _CODES[rounding.codes], *_numbers(rounding))
    return out


def rounded_linear(
    x: Tensor, weight: PackedWeight, rounding: RowQuantization, bias: Tensor | None = None
) -> Tensor:
    check_on_cpu("rounded_linear", "x", x)
    if x.dtype is not torch.float32 or not x.dim() or x.shape[-1] != weight.inputs:
        raise ValueError(f"rounded_linear: x must be float32 [..., {weight.inputs}]; it is {describe(x)}")
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


def _numbers(rounding: RowQuantization) -> tuple[float, float, float, float, int]:
    """Return the least integer, bound, scale and zero point (0 if absent), and 1 if computed steps shift, else 0."""
    given = (float(rounding.lowest), rounding.bound or 0.0, rounding.scale or 0.0, rounding.zero)
    return *given, int(not rounding.symmetric)
