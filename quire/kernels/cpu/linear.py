"""The packed-linear kernels as Python functions on tensors, with every check.

Invariant: as in `checks`; what a `PackedWeight` says of itself is checked against its memory before C++ sees it.
"""

import threading
from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.cpu import library
from quire.kernels.cpu.activation import ACTIVATIONS
from quire.kernels.cpu.calls import NOTHING, call, empty, recording
from quire.kernels.cpu.checks import check_array, check_index, dtype_code, say
from quire.kernels.cpu.huge_pages import in_matrix_memory, matrix_memory
from quire.kernels.formats import STREAM_CODES, format_of
from quire.kernels.linear import GATED, Ending, Native, PackedWeight, WeightScheme, num_panels

_NO_STREAM = -1
"""Stands for the type of what is not there: `kNoStream` of csrc/cpu/scaling.h."""
BLOCK_ROWS = 192
"""Rows that a kernel packs at a time, as in csrc/cpu/linear.h; it checks the scratch memory that follows from it."""


def packed_layout() -> str:
    """Name of the bytes that `pack_weight` makes here; the same name, the same bytes."""
    loaded = library.loaded()
    assert loaded is not None, "there are kernels"
    return f"{library.WEIGHT_LAYOUT} by {loaded.isa}, ABI {library.ABI_VERSION}"


def pack_weight(weight: Tensor, scheme: WeightScheme, halves: int = 1) -> PackedWeight:
    code = dtype_code("pack_weight", "weight", weight)
    if weight.dim() != 2 or not weight.numel() or halves not in (1, 2) or weight.shape[0] % halves:
        raise ValueError(f"pack_weight: weight must be [N, K] in {halves} halves; it is {say(weight)}")
    if not _rounded_here(scheme):
        return format_of(scheme).pack(weight, scheme, halves, "panels").moved(in_matrix_memory)
    packed = _empty(weight, scheme, halves)
    matrix, sizes, (_, layout), _ = checked("pack_weight", packed)
    if call("pack_weight", (*matrix, weight.contiguous()), *sizes, code, layout):
        assert packed.scales is not None, "scales that do not fit"
        # Into float16; one group is enough for the whole matrix, which has scales of one type.
        wide = matrix_memory(weight, *packed.scales.shape, dtype=torch.float32)
        packed = replace(packed, scales=wide)
        matrix, sizes, (_, layout), _ = checked("pack_weight", packed)
        call("pack_weight", (*matrix, weight.contiguous()), *sizes, code, layout)
    return packed


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: Ending | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dtype_code("packed_linear", "x", x)
    matrix, sizes, kernel_format, padded = weight.native or checked("packed_linear", weight)
    outputs, inputs, halves, *_ = sizes
    *lead, columns = x.shape
    if columns != inputs:
        raise ValueError(f"packed_linear: x must have {inputs} columns; it is {say(x)}")
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
    """Memory that a thread's kernels overwrite; kept, because taking it anew costs a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._kept = torch.empty(0)

    def of(self, num_floats: int) -> Tensor:
        """At least so many float32."""
        if recording.dry is not None:
            return recording.dry(num_floats)
        if recording.listener is not None:  # a recording outlives what is kept here
            return torch.empty(num_floats, dtype=torch.float32)
        if self._kept.numel() < num_floats:
            self._kept = torch.empty(num_floats, dtype=torch.float32)
        return self._kept


SCRATCH = _Scratch()
"""Of all products, of which a thread makes one at a time."""


def checked(op: str, weight: PackedWeight) -> Native:
    """What kernels are told of a weight: a packed weight never changes, so it is checked once."""
    kept, scheme, dtype = format_of(weight.scheme), weight.scheme, weight.data.dtype
    kept.check(op, weight)
    scales, zeros = (
        _NO_STREAM if part is None else STREAM_CODES[part.dtype] for part in (weight.scales, weight.zeros)
    )
    sizes = (weight.outputs, weight.inputs, weight.halves, kept.group(scheme, dtype), scales, zeros)
    padded = kept.padded(scheme, dtype, weight.inputs)
    native = Native(_tensors(weight), sizes, (int(scheme.fast), kept.code(dtype)), padded)
    object.__setattr__(weight, "native", native)
    return native


def _rounded_here(scheme: WeightScheme) -> bool:
    """Whether C++ rounds such weights; others are rare, and torch does."""
    return scheme.kind in ("float", "int4") or (scheme.kind == "int8" and scheme.symmetric)


def _tensors(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    scales, zeros = (NOTHING if part is None else part for part in (weight.scales, weight.zeros))
    return weight.data, scales, zeros


def _empty(weight: Tensor, scheme: WeightScheme, halves: int) -> PackedWeight:
    outputs, inputs = weight.shape
    parts = format_of(scheme).parts(scheme, weight.dtype, num_panels(outputs, halves), inputs)
    tensors = [matrix_memory(weight, *part.shape, dtype=part.dtype) for part in parts]
    scales, zeros = (*tensors[1:], None, None)[:2]
    return PackedWeight(scheme, tensors[0], scales, zeros, outputs, inputs, halves)
