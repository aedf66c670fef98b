"""The packed-linear kernels as Python functions on tensors, with every check.

Invariant: as in `binding`; what a `PackedWeight` says of itself is checked against its memory before C++ sees it.
"""

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from quire.kernels.cpu import library
from quire.kernels.cpu.binding import _call, _code, _say
from quire.kernels.linear import INT8_CHUNK, PANEL, QUAD, PackedWeight, WeightScheme, num_panels

GROUP_SIZES = (32, 64, 128)

_FORMATS = {"int8": 3, "int4": 4}
"""The codes of `enum Format` in csrc/cpu/panels.h; floats have those of their dtype."""
_DTYPES = {
    "float": (),
    "int8": (torch.uint8, torch.float32),
    "int4": (torch.uint8, torch.bfloat16, torch.uint8),
}
"""Of data, scales and zeros; a float weight has its own."""
_ACTIVATIONS = {None: 0, "silu_and_mul": 1}
_BLOCK_ROWS = 192
"""Rows that a kernel packs at a time, as in csrc/cpu/linear.h; it checks the scratch memory that follows from it."""

_LAYOUT = 2
"""Raised when a matrix would be packed into other bytes."""


def packed_layout() -> str:
    """Name of the bytes that `pack_weight` makes here; the same name, the same bytes."""
    loaded = library.loaded()
    assert loaded is not None, "there are kernels"
    return f"{loaded.isa}-{_LAYOUT}"


def pack_weight(weight: Tensor, scheme: WeightScheme, halves: int = 1) -> PackedWeight:
    code = _code("pack_weight", "weight", weight)
    if weight.dim() != 2 or not weight.numel() or halves not in (1, 2) or weight.shape[0] % halves:
        raise ValueError(f"pack_weight: weight must be [N, K] in {halves} halves; it is {_say(weight)}")
    packed = _empty(weight, scheme, halves)
    _check_packed("pack_weight", packed)
    weight = weight.contiguous()
    args = (*weight.shape, halves, _group(scheme), code, _format(packed))
    _call("pack_weight", (packed.data, packed.scales, packed.zeros, weight), *args)
    return packed


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: Literal["silu_and_mul"] | None = None,
) -> Tensor:
    _code("packed_linear", "x", x)
    _check_packed("packed_linear", weight)
    outputs, inputs, halves = weight.outputs, weight.inputs, weight.halves
    if x.shape[-1] != inputs:
        raise ValueError(f"packed_linear: x must have {inputs} columns; it is {_say(x)}")
    if bias is not None:
        _code("packed_linear", "bias", bias)
        if bias.dtype != torch.float32 or bias.shape != (outputs,) or not bias.is_contiguous():
            raise ValueError(f"packed_linear: bias must be float32 [{outputs}]; it is {_say(bias)}")
    if activation not in _ACTIVATIONS or (activation is not None and halves != 2):
        raise ValueError(f"packed_linear: activation {activation!r} with a weight in {halves} parts")
    wide = x.float().contiguous()
    rows = wide.numel() // inputs
    out = torch.empty((*x.shape[:-1], outputs if activation is None else outputs // 2), dtype=torch.float32)
    group = _group(weight.scheme)
    padded = -(-inputs // group) * group
    scratch = torch.empty(_BLOCK_ROWS + min(rows, _BLOCK_ROWS) * (padded + 1), dtype=torch.float32)
    args = (scratch.nbytes, rows, outputs, inputs, halves, group, _ACTIVATIONS[activation])
    tensors = (out, wide, weight.data, weight.scales, weight.zeros, bias, scratch)
    _call("packed_linear", tensors, *args, int(weight.scheme.fast), _format(weight))
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def packed_embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    _check_packed("packed_embedding", weight)
    if ids.device.type != "cpu" or ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"packed_embedding: ids must be int64 [T] on the CPU; it is {_say(ids)}")
    ids = ids.contiguous()
    out = torch.empty((len(ids), weight.inputs), dtype=torch.float32)
    sizes = (len(ids), weight.outputs, weight.inputs, weight.halves, _group(weight.scheme))
    refused = _call(
        "packed_embedding", (out, ids, weight.data, weight.scales, weight.zeros), *sizes, _format(weight)
    )
    if refused:
        raise IndexError(f"packed_embedding: {refused} ids are outside the table of {weight.outputs} rows")
    return out


def _group(scheme: WeightScheme) -> int:
    """What k is padded to a multiple of."""
    return {"float": 1, "int8": INT8_CHUNK, "int4": scheme.group_size}[scheme.kind]


def _format(weight: PackedWeight) -> int:
    kind = weight.scheme.kind
    return library.DTYPE_CODES[weight.data.dtype] if kind == "float" else _FORMATS[kind]


def _empty(weight: Tensor, scheme: WeightScheme, halves: int) -> PackedWeight:
    outputs, inputs = weight.shape
    shapes = _shapes(scheme, num_panels(outputs, halves), inputs)
    dtypes = (weight.dtype,) if scheme.kind == "float" else _DTYPES[scheme.kind]
    parts = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    scales, zeros = (*parts[1:], None, None)[:2]
    return PackedWeight(scheme, parts[0], scales, zeros, outputs, inputs, halves)


def _shapes(scheme: WeightScheme, panels: int, inputs: int) -> list[tuple[int, ...]]:
    """Of data, scales and zeros, as far as the scheme has them."""
    if scheme.kind == "float":
        return [(panels, inputs, PANEL)]
    if scheme.kind == "int8":
        return [(panels, -(-inputs // INT8_CHUNK) * INT8_CHUNK // QUAD, PANEL, QUAD), (panels, PANEL)]
    groups = -(-inputs // scheme.group_size)
    scales = (panels, groups, PANEL)
    return [
        (panels, groups * scheme.group_size // (2 * QUAD), PANEL, QUAD),
        scales,
        *([] if scheme.symmetric else [scales]),
    ]


def _floats(scheme: WeightScheme) -> Collection[torch.dtype]:
    return library.DTYPE_CODES if scheme.kind == "float" else ()


def _check_packed(op: str, weight: PackedWeight) -> None:
    scheme = weight.scheme
    if scheme.kind == "int4" and scheme.group_size not in GROUP_SIZES:
        raise ValueError(f"{op}: group_size must be one of {GROUP_SIZES}; it is {scheme.group_size}")
    expected = _shapes(scheme, num_panels(weight.outputs, weight.halves), weight.inputs)
    parts = [part for part in (weight.data, weight.scales, weight.zeros) if part is not None]
    if [tuple(part.shape) for part in parts] != expected or weight.outputs % weight.halves:
        shapes = [list(part.shape) for part in parts]
        raise ValueError(f"{op}: a {scheme.kind} weight [{weight.outputs}, {weight.inputs}] holds {shapes}")
    expected_dtypes = _DTYPES[scheme.kind][: len(parts)]
    if tuple(part.dtype for part in parts) != expected_dtypes and weight.data.dtype not in _floats(scheme):
        raise TypeError(f"{op}: a {scheme.kind} weight holds {[part.dtype for part in parts]}")
    if not all(part.is_contiguous() and part.device.type == "cpu" for part in parts):
        raise ValueError(f"{op}: a packed weight must be contiguous and on the CPU")
