"""Convolution and recurrences of layers with a state as functions on tensors, with every check."""

import torch
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.cpu.calls import NOTHING, call, empty
from quire.kernels.cpu.checks import check_array, dtype_code, say
from quire.kernels.cpu.states import bad_request, check_states

_MOST_STATES = 256
"""Of a channel of Mamba; as in csrc/cpu/scan.cpp."""
_MOST_OF_HEAD = 65536
"""Floats that a head of Mamba 2 keeps; as there."""


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    silu: bool = False,
) -> Tensor:
    op = "causal_conv"
    rows, taps = _count(op, "x", x), _count(op, "weight", weight)
    channels = weight.shape[1]
    wide = _rows(op, "x", x, rows, channels)
    check_array(op, "weight", weight, torch.float32, (taps, channels))
    if bias is not None:
        check_array(op, "bias", bias, torch.float32, (channels,))
    of = check_states(op, states, (taps - 1, channels), rows, metadata)
    out = empty(wide, rows, channels)
    tensors = (out, wide, weight, NOTHING if bias is None else bias, states, *of.tensors)
    refused = call(op, tensors, *of.sizes, of.stride, wide.stride(0), channels, taps, int(silu))
    return _result(op, out.to(x.dtype), refused, states, metadata)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    gate: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
) -> Tensor:
    op = "selective_scan"
    rows, count = _count(op, "x", x), _count(op, "a", a)
    channels = a.shape[1]
    if not 0 < count <= _MOST_STATES:
        raise ValueError(f"{op}: a channel must have 1 to {_MOST_STATES} states; it has {count}")
    check_array(op, "a", a, torch.float32, (count, channels))
    check_array(op, "skip", skip, torch.float32, (channels,))
    wide, times = _rows(op, "x", x, rows, channels), _rows(op, "dt", dt, rows, channels)
    into, outof = _rows(op, "b", b, rows, count), _rows(op, "c", c, rows, count)
    by = NOTHING if gate is None else _rows(op, "gate", gate, rows, channels)
    of = check_states(op, states, (count, channels), rows, metadata)
    out = empty(wide, rows, channels)
    strides = [part.stride(0) for part in (wide, times, into, outof, by)]
    tensors = (out, wide, times, a, into, outof, skip, by, states, *of.tensors)
    refused = call(op, tensors, *of.sizes, of.stride, *strides, channels, count)
    return _result(op, out.to(x.dtype), refused, states, metadata)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    gate: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    groups: int = 1,
    time_limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    op = "ssd_scan"
    rows = _count(op, "x", x)
    heads, count, size = states.shape[1:] if states.dim() == 4 else (0, 0, 0)
    if groups < 1 or heads % groups or not heads:
        raise ValueError(f"{op}: states {say(states)} must have heads that are a multiple of {groups} groups")
    if count * size > _MOST_OF_HEAD:
        raise ValueError(f"{op}: a head keeps {count * size} floats, and may keep {_MOST_OF_HEAD}")
    for name, each in (("a", a), ("skip", skip), ("dt_bias", dt_bias)):
        check_array(op, name, each, torch.float32, (heads,))
    wide, times = _rows(op, "x", x, rows, heads * size), _rows(op, "dt", dt, rows, heads)
    into, outof = _rows(op, "b", b, rows, groups * count), _rows(op, "c", c, rows, groups * count)
    by = NOTHING if gate is None else _rows(op, "gate", gate, rows, heads * size)
    of = check_states(op, states, (heads, count, size), rows, metadata)
    out = empty(wide, rows, heads * size)
    strides = [part.stride(0) for part in (wide, times, into, outof, by)]
    tensors = (out, wide, times, a, into, outof, skip, dt_bias, by, states, *of.tensors)
    numbers = (*of.sizes, of.stride, *strides, heads, size, groups, count)
    refused = call(op, tensors, *numbers, *time_limits)
    return _result(op, out.to(x.dtype), refused, states, metadata)


def _count(op: str, name: str, matrix: Tensor) -> int:
    """Rows of a matrix."""
    if matrix.dim() != 2:
        raise ValueError(f"{op}: {name} must have two dimensions; it is {say(matrix)}")
    return matrix.shape[0]


def _rows(op: str, name: str, rows: Tensor, count: int, width: int) -> Tensor:
    """[count, width] of any float dtype, each row in one piece, as float32."""
    dtype_code(op, name, rows)
    if rows.shape != (count, width) or (rows.numel() and rows.stride(1) != 1):
        raise ValueError(f"{op}: {name} must be [{count}, {width}], each row in one piece; it is {say(rows)}")
    return rows.float()


def _result(op: str, out: Tensor, refused: int, states: Tensor, metadata: StateMetadata) -> Tensor:
    if refused:
        raise IndexError(bad_request(op, metadata, refused - 1, len(states)))
    return out
