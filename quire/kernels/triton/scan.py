"""The recurrences of Mamba and Mamba 2: a program walks through a request's tokens with a part of its state.

A. Gu and T. Dao, "Mamba" (2023, arXiv:2312.00752); T. Dao and A. Gu, "Transformers are SSMs" (2024, arXiv:2405.21060).

Invariant: tokens are taken one after the other, and never in chunks, whose sums would depend on where they begin; so no
bit depends on how a prompt was cut, or on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.triton.launch import next_power_of_2
from quire.kernels.triton.states import left_in, of_requests, softplus, state_rows

ELEMENTS = 2048
"""Of the state that a program holds, about."""


@triton.jit
def _gated(value, gate, column, inside):
    z = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    return value * z / (1.0 + tl.exp(-z))


@triton.jit(do_not_specialize=["num_blocks"])
def _selective_scan(
    out, x, dt, a, b, c, skip, gate, states, starts, lengths, kept_lens, tables, table_width, num_blocks,
    x_row, dt_row, b_row, c_row, gate_row, state_stride, channels, count,
    HAS_GATE: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """States [COUNT, TILE]: those of some channels."""
    request = tl.program_id(0)
    first, last, before, end, table, source = state_rows(
        starts, lengths, kept_lens, tables, table_width, request, num_blocks, PAGE
    )
    index, column = tl.arange(0, COUNT), tl.program_id(1) * TILE + tl.arange(0, TILE)
    counted, inside = index < count, column < channels
    both = counted[:, None] & inside[None, :]
    place = index[:, None] * channels + column[None, :]
    state = tl.load(states + source * state_stride + place, mask=tl.where(source > 0, both, False), other=0.0)
    rates = tl.load(a + place, mask=both, other=0.0)
    skipped = tl.load(skip + column, mask=inside, other=0.0)
    for step in range(last - first):
        at = (first + step).to(tl.int64)
        value = tl.load(x + at * x_row + column, mask=inside, other=0.0).to(tl.float32)
        time = softplus(tl.load(dt + at * dt_row + column, mask=inside, other=0.0).to(tl.float32))
        into = tl.load(b + at * b_row + index, mask=counted, other=0.0).to(tl.float32)
        outof = tl.load(c + at * c_row + index, mask=counted, other=0.0).to(tl.float32)
        state = tl.exp(time[None, :] * rates) * state + into[:, None] * (time * value)[None, :]
        result = tl.sum(state * outof[:, None], 0) + skipped * value
        if HAS_GATE:
            result = _gated(result, gate + at * gate_row, column, inside)
        tl.store(out + at * channels + column, result.to(out.dtype.element_ty), mask=inside)
        target = left_in(table, before + step + 1, end, num_blocks, PAGE)
        if target > 0:
            tl.store(states + target * state_stride + place, state, mask=both)


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
    """See `ops.selective_scan`."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    count, channels = a.shape
    if out.numel():
        counted = next_power_of_2(count)
        tile = max(ELEMENTS // counted, 16)
        _selective_scan[(len(metadata.seq_lens), triton.cdiv(channels, tile))](
            out, x, dt, a, b, c, skip, gate, states, *of_requests(metadata, states),
            x.stride(0), dt.stride(0), b.stride(0), c.stride(0), 0 if gate is None else gate.stride(0),
            states.stride(0), channels, count,
            HAS_GATE=gate is not None, PAGE=metadata.block_size, COUNT=counted, TILE=tile,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_blocks"])
def _ssd_scan(
    out, x, dt, a, b, c, skip, dt_bias, gate, states, starts, lengths, kept_lens, tables, table_width, num_blocks,
    x_row, dt_row, b_row, c_row, gate_row, state_stride, size, count, heads_per_group, shortest, longest,
    HAS_GATE: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """States [COUNT, TILE]: those of some channels of a head."""
    request, head = tl.program_id(0), tl.program_id(1)
    first, last, before, end, table, source = state_rows(
        starts, lengths, kept_lens, tables, table_width, request, num_blocks, PAGE
    )
    index, column = tl.arange(0, COUNT), tl.program_id(2) * TILE + tl.arange(0, TILE)
    counted, inside = index < count, column < size
    both = counted[:, None] & inside[None, :]
    place = (head * count + index[:, None]) * size + column[None, :]
    state = tl.load(states + source * state_stride + place, mask=tl.where(source > 0, both, False), other=0.0)
    rate, skipped, more = tl.load(a + head), tl.load(skip + head), tl.load(dt_bias + head)
    of_group, channel = head // heads_per_group * count + index, head * size + column
    width = tl.num_programs(1) * size
    for step in range(last - first):
        at = (first + step).to(tl.int64)
        value = tl.load(x + at * x_row + channel, mask=inside, other=0.0).to(tl.float32)
        time = softplus(tl.load(dt + at * dt_row + head).to(tl.float32) + more)
        time = tl.minimum(tl.maximum(time, shortest), longest)
        into = tl.load(b + at * b_row + of_group, mask=counted, other=0.0).to(tl.float32)
        outof = tl.load(c + at * c_row + of_group, mask=counted, other=0.0).to(tl.float32)
        state = tl.exp(time * rate) * state + into[:, None] * (time * value)[None, :]
        result = tl.sum(state * outof[:, None], 0) + skipped * value
        if HAS_GATE:
            result = _gated(result, gate + at * gate_row, channel, inside)
        tl.store(out + at * width + channel, result.to(out.dtype.element_ty), mask=inside)
        target = left_in(table, before + step + 1, end, num_blocks, PAGE)
        if target > 0:
            tl.store(states + target * state_stride + place, state, mask=both)


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
    """See `ops.ssd_scan`."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    _, heads, count, size = states.shape
    if out.numel():
        counted = next_power_of_2(count)
        tile = min(max(ELEMENTS // counted, 16), max(next_power_of_2(size), 16))
        _ssd_scan[(len(metadata.seq_lens), heads, triton.cdiv(size, tile))](
            out, x, dt, a, b, c, skip, dt_bias, gate, states, *of_requests(metadata, states),
            x.stride(0), dt.stride(0), b.stride(0), c.stride(0), 0 if gate is None else gate.stride(0),
            states.stride(0), size, count, heads // groups, *time_limits,
            HAS_GATE=gate is not None, PAGE=metadata.block_size, COUNT=counted, TILE=tile,
        )  # fmt: skip
    return out
