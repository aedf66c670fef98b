"""The packed-linear kernels as Python functions on tensors, with every check.

Invariant: as in `checks`; what a `PackedWeight` says of itself is checked against its memory before C++ sees it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.kernels.cpu import library
from quire.kernels.cpu.calls import NOTHING, call, empty, recording
from quire.kernels.cpu.checks import check_array, check_index, dtype_code, say
from quire.kernels.linear import (
    CHUNK,
    PAIR,
    PANEL,
    QUAD,
    Native,
    PackedWeight,
    WeightScheme,
    num_panels,
)

GROUP_SIZES = (32, 64, 128)

_Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class _Format:
    """How weights of one kind lie in panels; `dtype` below is that of the data where the kind leaves it open."""

    code: Callable[[torch.dtype], int]
    """As in `enum Format` of csrc/cpu/panels.h."""
    dtypes: Callable[[torch.dtype], tuple[torch.dtype, ...]]
    """Of data, scales and zeros, as far as there are any."""
    group: Callable[[WeightScheme, torch.dtype], int]
    """Values of k that share a scale, or that k is padded to a multiple of where there is none."""
    shapes: Callable[[WeightScheme, int, int, torch.dtype], _Shapes]
    """Of data, scales and zeros of so many panels and padded k."""


def _float_shapes(_scheme: WeightScheme, panels: int, padded: int, dtype: torch.dtype) -> _Shapes:
    paired = dtype is torch.bfloat16
    return [(panels, padded // PAIR, PANEL, PAIR) if paired else (panels, padded, PANEL)]


def _int8_shapes(_scheme: WeightScheme, panels: int, padded: int, _dtype: torch.dtype) -> _Shapes:
    return [(panels, padded // QUAD, PANEL, QUAD), (panels, PANEL)]


def _int4_group(scheme: WeightScheme, _dtype: torch.dtype) -> int:
    if scheme.group_size not in GROUP_SIZES:
        raise ValueError(f"int4: group_size must be one of {GROUP_SIZES}; it is {scheme.group_size}")
    return scheme.group_size


def _int4_shapes(scheme: WeightScheme, panels: int, padded: int, _dtype: torch.dtype) -> _Shapes:
    scales = (panels, padded // scheme.group_size, PANEL)
    data = (panels, padded // (2 * QUAD), PANEL, QUAD)
    return [data, scales] if scheme.symmetric else [data, scales, scales]


_FORMATS = {
    "float": _Format(
        library.DTYPE_CODES.__getitem__,
        lambda dtype: (dtype,) if dtype in library.DTYPE_CODES else (),
        lambda _scheme, dtype: PAIR if dtype is torch.bfloat16 else 1,
        _float_shapes,
    ),
    "int8": _Format(
        lambda _dtype: 3,
        lambda _dtype: (torch.uint8, torch.float32),
        lambda _scheme, _dtype: CHUNK,
        _int8_shapes,
    ),
    "int4": _Format(
        lambda _dtype: 4,
        lambda _dtype: (torch.uint8, torch.bfloat16, torch.uint8),
        _int4_group,
        _int4_shapes,
    ),
}
"""The kinds of `WeightScheme` that these kernels read."""
_ACTIVATIONS = {None: 0, "silu_and_mul": 1}
_BLOCK_ROWS = 192
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
    packed = _empty(weight, scheme, halves)
    _check_packed("pack_weight", packed)
    weight = weight.contiguous()
    tensors = (*_tensors(packed), weight)
    call("pack_weight", tensors, *weight.shape, halves, _group(packed), code, _format(packed))
    return packed


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: Literal["silu_and_mul"] | None = None,
) -> Tensor:
    dtype_code("packed_linear", "x", x)
    matrix, sizes, kernel_format = weight.native or _checked("packed_linear", weight)
    outputs, inputs, halves, group = sizes
    *lead, columns = x.shape
    if columns != inputs:
        raise ValueError(f"packed_linear: x must have {inputs} columns; it is {say(x)}")
    if bias is not None:
        check_array("packed_linear", "bias", bias, torch.float32, (outputs,))
    if activation is not None:
        if activation != "silu_and_mul" or halves != 2:
            raise ValueError(f"packed_linear: activation {activation!r} with a weight in {halves} parts")
        outputs //= 2
    wide = x.float().contiguous()
    rows = wide.numel() // inputs
    out = empty(wide, *lead, outputs)
    scratch = _SCRATCH.of(_BLOCK_ROWS + min(rows, _BLOCK_ROWS) * (_padded(inputs, group) + 1))
    tensors = (out, wide, *matrix, NOTHING if bias is None else bias, scratch)
    call("packed_linear", tensors, scratch.nbytes, rows, *sizes, _ACTIVATIONS[activation], *kernel_format)
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def packed_embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    matrix, sizes, (_, layout) = weight.native or _checked("packed_embedding", weight)
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
        if recording.listener is not None:  # a recording outlives what is kept here
            return torch.empty(num_floats, dtype=torch.float32)
        if self._kept.numel() < num_floats:
            self._kept = torch.empty(num_floats, dtype=torch.float32)
        return self._kept


_SCRATCH = _Scratch()


def _checked(op: str, weight: PackedWeight) -> Native:
    """What kernels are told of a weight: a packed weight never changes, so it is checked once."""
    _check_packed(op, weight)
    sizes = (weight.outputs, weight.inputs, weight.halves, _group(weight))
    native = Native(_tensors(weight), sizes, (int(weight.scheme.fast), _format(weight)))
    object.__setattr__(weight, "native", native)
    return native


def _tensors(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    scales, zeros = (NOTHING if part is None else part for part in (weight.scales, weight.zeros))
    return weight.data, scales, zeros


def _group(weight: PackedWeight) -> int:
    return _FORMATS[weight.scheme.kind].group(weight.scheme, weight.data.dtype)


def _padded(inputs: int, group: int) -> int:
    """k of whole groups and, of integers, whole chunks."""
    unit = group if group <= PAIR else max(group, CHUNK)
    return -(-inputs // unit) * unit


def _format(weight: PackedWeight) -> int:
    return _FORMATS[weight.scheme.kind].code(weight.data.dtype)


def _empty(weight: Tensor, scheme: WeightScheme, halves: int) -> PackedWeight:
    outputs, inputs = weight.shape
    shapes = _shapes(scheme, num_panels(outputs, halves), inputs, weight.dtype)
    dtypes = _FORMATS[scheme.kind].dtypes(weight.dtype)
    parts = [empty(weight, *shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    scales, zeros = (*parts[1:], None, None)[:2]
    return PackedWeight(scheme, parts[0], scales, zeros, outputs, inputs, halves)


def _shapes(scheme: WeightScheme, panels: int, inputs: int, dtype: torch.dtype) -> _Shapes:
    """Of data, scales and zeros, as far as the scheme has them; floats are of that dtype."""
    layout = _FORMATS[scheme.kind]
    return layout.shapes(scheme, panels, _padded(inputs, layout.group(scheme, dtype)), dtype)


def _check_packed(op: str, weight: PackedWeight) -> None:
    scheme, dtype = weight.scheme, weight.data.dtype
    expected = _shapes(scheme, num_panels(weight.outputs, weight.halves), weight.inputs, dtype)
    parts = [part for part in (weight.data, weight.scales, weight.zeros) if part is not None]
    if [tuple(part.shape) for part in parts] != expected or weight.outputs % weight.halves:
        shapes = [list(part.shape) for part in parts]
        raise ValueError(f"{op}: a {scheme.kind} weight [{weight.outputs}, {weight.inputs}] holds {shapes}")
    expected_dtypes = _FORMATS[scheme.kind].dtypes(dtype)[: len(parts)]
    if tuple(part.dtype for part in parts) != expected_dtypes:
        raise TypeError(f"{op}: a {scheme.kind} weight holds {[part.dtype for part in parts]}")
    if not all(part.is_contiguous() and part.device.type == "cpu" for part in parts):
        raise ValueError(f"{op}: a packed weight must be contiguous and on the CPU")
