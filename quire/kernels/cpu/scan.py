# SPDX-License-Identifier: Apache-2.0
"""Convolution and recurrences of recurrent layers, as functions on tensors, with all checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.cpu.calls import NOTHING, call, check_array, describe, dtype_code, empty


class StateArguments(NamedTuple):
    """Arguments of a kernel that reads and updates states, in order."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """query_start_loc, seq_lens, the same without drafts, and block_tables."""
    sizes: tuple[int, int, int, int, int]
    """Rows, requests, entries of a table, tokens of a block, blocks of the cache."""
    stride: int
    """Floats between the states of adjacent blocks."""


def check_states(
    op: str, states: Tensor, shape: tuple[int, ...], rows: int, metadata: StateMetadata
) -> StateArguments:
    """Return the state arguments of a step of `rows`; `states` [blocks, *shape] float32, each block's contiguous."""
    fits = states.dim() == 1 + len(shape) and states.shape[1:] == shape
    if not fits or not states[:1].is_contiguous() or not states.is_cpu or states.dtype is not torch.float32:
        raise ValueError(
            f"{op}: states must be float32 [blocks, {', '.join(map(str, shape))}] on the CPU, each block's contiguous; "
            f"they are {describe(states)}"
        )
    tensors = (metadata.query_start_loc, metadata.seq_lens, metadata.kept, metadata.block_tables)
    starts, lengths, kept, tables = tensors
    of_requests = tables.dim() == 2 and lengths.shape == kept.shape == tables.shape[:1]
    if not of_requests or starts.shape != (len(lengths) + 1,):
        shapes = ", ".join(map(describe, tensors))
        raise ValueError(f"{op}: metadata must be [R + 1], [R], [R] and [R, blocks]; it is {shapes}")
    for tensor in tensors:
        if tensor.dtype is not torch.int32 or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(f"{op}: metadata must be contiguous int32; it has {describe(tensor)}")
    sizes = (rows, *tables.shape, metadata.block_size, len(states))
    return StateArguments(tensors, sizes, states.stride(0))


def bad_request(op: str, metadata: StateMetadata, request: int, num_blocks: int) -> str:
    """Return what is wrong with a request that a kernel refused, or with the bounds if there is no such request."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    if request == len(lengths):
        return f"{op}: query_start_loc {starts} does not fit the rows"
    drafts = lengths[request] - int(metadata.kept[request])
    tokens = f"{lengths[request]} tokens" + (f", {drafts} of them drafts," if drafts else "")
    return (
        f"{op}: request {request} with rows [{starts[request]}, {starts[request + 1]}), {tokens} and blocks "
        f"{metadata.block_tables[request].tolist()} does not fit the rows or the cache of {num_blocks} blocks"
    )


_GATES = 4
"""Numbers per token and value head, besides decays; as in csrc/cpu/gated_delta.cpp."""


def gated_delta(
    qkv: Tensor,
    ba: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    strongest: float = 1.0,
    least: float | None = None,
) -> Tensor:
    dtype_code("gated_delta", "qkv", qkv)
    if states.dim() != 4 or qkv.dim() != 2:
        raise ValueError(
            f"gated_delta: qkv must be [T, N] and states [blocks, Hv, Dk, Dv]; they are"
            f" {describe(qkv)}, {describe(states)}"
        )
    _, value_heads, keys, values = states.shape
    rows, width = qkv.shape
    key_heads, rest = divmod(width - value_heads * values, 2 * keys)
    if rest or key_heads < 1 or value_heads % key_heads:
        raise ValueError(f"gated_delta: qkv is {describe(qkv)} and does not fit states {list(states.shape)}")
    steps = keys if dt_bias.numel() == value_heads * keys else 1
    check_array("gated_delta", "ba", ba, qkv.dtype, (rows, value_heads * (1 + steps)))
    check_array("gated_delta", "rates", rates, torch.float32, (value_heads,))
    check_array("gated_delta", "dt_bias", dt_bias, torch.float32, (value_heads * steps,))
    step = check_states("gated_delta", states, (value_heads, keys, values), rows, metadata)
    wide, ba = qkv.float().contiguous(), ba.float()
    out = empty(wide, rows, value_heads, values)
    gates, decays = empty(wide, rows, value_heads, _GATES), empty(wide, rows, value_heads, steps)
    tensors = (out, wide, ba, rates, dt_bias, states, gates, decays, *step.tensors)
    sizes = (key_heads, value_heads, keys, values, steps)
    refused = call("gated_delta", tensors, *step.sizes, step.stride, *sizes, strongest, least or 0.0)
    if refused:
        raise IndexError(bad_request("gated_delta", metadata, refused - 1, len(states)))
    return out.to(qkv.dtype)


def rg_lru(
    x: Tensor, weights: Tensor, bias: Tensor, rates: Tensor, states: Tensor, metadata: StateMetadata
) -> Tensor:
    dtype_code("rg_lru", "x", x)
    if weights.dim() != 3 or x.dim() != 2:
        raise ValueError(
            f"rg_lru: x must be [T, h * D], weights [h, D, 2 * D]; they are {describe(x)}, {describe(weights)}"
        )
    heads, size, _ = weights.shape
    check_array("rg_lru", "weights", weights, torch.float32, (heads, size, 2 * size))
    check_array("rg_lru", "bias", bias, torch.float32, (heads, 2 * size))
    check_array("rg_lru", "rates", rates, torch.float32, (heads * size,))
    rows = len(x)
    wide = x.float().contiguous()
    check_array("rg_lru", "x", wide, torch.float32, (rows, heads * size))
    step = check_states("rg_lru", states, (heads * size,), rows, metadata)
    out, gates = empty(wide, rows, heads * size), empty(wide, rows, heads, 2 * size)
    tensors = (out, wide, weights, bias, rates, states, gates, *step.tensors)
    refused = call("rg_lru", tensors, *step.sizes, step.stride, heads, size)
    if refused:
        raise IndexError(bad_request("rg_lru", metadata, refused - 1, len(states)))
    return out.to(x.dtype)


def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    of_heads: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    eps: float,
) -> Tensor:
    dtype_code("rwkv7", "r", r)
    if states.dim() != 4 or r.dim() != 2:
        raise ValueError(
            f"rwkv7: r must be [T, h * D] and states [blocks, h, D, D]; they are {describe(r)}, {describe(states)}"
        )
    rows, (heads, size) = len(r), states.shape[1:3]
    named = {"r": r, "w": w, "k": k, "v": v, "a": a}
    for name, tensor in named.items():
        if tensor.dtype != r.dtype or tensor.shape != (rows, heads * size) or not tensor.is_cpu:
            raise ValueError(
                f"rwkv7: {name} must be {r.dtype} [{rows}, {heads * size}]; it is {describe(tensor)}"
            )
    check_array("rwkv7", "of_heads", of_heads, torch.float32, (5, heads * size))
    step = check_states("rwkv7", states, (heads, size, size), rows, metadata)
    wide = [tensor.float().contiguous() for tensor in named.values()]
    out, scratch = empty(wide[0], rows, heads * size), empty(wide[0], 4, rows, heads * size)
    tensors = (out, *wide, of_heads, states, scratch, *step.tensors)
    refused = call("rwkv7", tensors, *step.sizes, step.stride, heads, size, eps)
    if refused:
        raise IndexError(bad_request("rwkv7", metadata, refused - 1, len(states)))
    return out.to(r.dtype)


_MAX_STATES = 256
"""Largest number of states of a Mamba channel; as in csrc/cpu/scan.cpp."""
_MAX_HEAD_STATE = 65536
"""Largest number of floats of a Mamba 2 head's state; as there."""


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
    if not 0 < count <= _MAX_STATES:
        raise ValueError(f"{op}: a channel must have 1 to {_MAX_STATES} states; it has {count}")
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
        raise ValueError(
            f"{op}: states {describe(states)} must have heads that are a multiple of {groups} groups"
        )
    if count * size > _MAX_HEAD_STATE:
        raise ValueError(f"{op}: a head keeps {count * size} floats, and may keep {_MAX_HEAD_STATE}")
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
    """Return the number of rows."""
    if matrix.dim() != 2:
        raise ValueError(f"{op}: {name} must have two dimensions; it is {describe(matrix)}")
    return matrix.shape[0]


def _rows(op: str, name: str, rows: Tensor, count: int, width: int) -> Tensor:
    """Return rows [count, width] of any float dtype, each row contiguous, as float32."""
    dtype_code(op, name, rows)
    if rows.shape != (count, width) or (rows.numel() and rows.stride(1) != 1):
        raise ValueError(
            f"{op}: {name} must be [{count}, {width}], each row in one piece; it is {describe(rows)}"
        )
    return rows.float()


def _result(op: str, out: Tensor, refused: int, states: Tensor, metadata: StateMetadata) -> Tensor:
    if refused:
        raise IndexError(bad_request(op, metadata, refused - 1, len(states)))
    return out
