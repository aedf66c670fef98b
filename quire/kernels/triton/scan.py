# SPDX-License-Identifier: Apache-2.0
"""Causal convolution and the recurrences of Mamba and Mamba 2: a program iterates over a request's tokens.

A. Gu and T. Dao, "Mamba" (2023, arXiv:2312.00752); T. Dao and A. Gu, "Transformers are SSMs" (2024, arXiv:2405.21060).

Invariant: tokens are processed one after the other, and never in chunks, whose sums would depend on where they begin;
so no bit depends on prompt chunking, or on the batch. These kernels and their oracle, `quire.kernels.reference_scan`,
read a table of states in the same way. A block outside the cache is neither read nor written. No program overwrites
state that another program reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.triton.launch import next_power_of_2

ROWS = 16
COLUMNS = 128


@triton.jit
def state_rows(starts, lengths, kept_lens, tables, table_width, request, num_blocks, PAGE: tl.constexpr):
    """Return a request's rows [first, last), the tokens before them, the tokens before its last written state, its
    table, and the block of the state before its rows; 0: it starts here. A request of length 0 has no rows.
    """
    first, last, end = tl.load(starts + request), tl.load(starts + request + 1), tl.load(lengths + request)
    last = tl.where(end > 0, last, first)
    before = tl.maximum(end - (last - first), 0)
    table = tables + request.to(tl.int64) * table_width
    source = tl.load(table + (before - 1) // PAGE, mask=(before > 0) & (first < last), other=0)
    return first, last, before, tl.load(kept_lens + request), table, _place(source, num_blocks)


@triton.jit
def _place(block, num_blocks):
    return tl.where((block > 0) & (block < num_blocks), block, 0).to(tl.int64)


@triton.jit
def left_in(table, position, end, num_blocks, PAGE: tl.constexpr):
    """Return the block for the state after `position` tokens; 0: none. Tokens after `end` are drafts."""
    is_left = ((position % PAGE == 0) | (position == end)) & (position <= end)
    return _place(tl.load(table + (position - 1) // PAGE, mask=is_left, other=0), num_blocks)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), accurate also if e^x is small beside 1."""
    small = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + small
    rounded = tl.where(whole == 1.0, 1.0, whole - 1.0)
    return tl.where(x > 20.0, x, tl.where(whole == 1.0, small, tl.log(whole) * (small / rounded)))


@triton.jit
def _inputs(
    x, states, at, column, inside, first, source, row_stride, state_stride, channels, TAPS: tl.constexpr
):
    """Return inputs of rows `at` [M, 1]; those before `first` come from the state."""
    value = tl.load(x + at.to(tl.int64) * row_stride + column, mask=inside & (at >= first), other=0.0).to(
        tl.float32
    )
    place = states + source * state_stride + (at - first + TAPS - 1) * channels + column
    return value + tl.load(place, mask=tl.where(source > 0, inside & (at < first), False), other=0.0)


@triton.jit(do_not_specialize=["num_blocks"])
def _causal_conv(
    out, x, weight, bias, states, starts, lengths, kept_lens, tables, table_width, num_blocks,
    row_stride, state_stride, channels, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Process some rows of a request; its first program writes the states, as only it reads the previous one."""
    request, tile = tl.program_id(0), tl.program_id(1)
    first, last, before, end, table, source = state_rows(
        starts, lengths, kept_lens, tables, table_width, request, num_blocks, PAGE
    )
    row = first + tile * ROWS + tl.arange(0, ROWS)[:, None]
    if first + tile * ROWS >= last:
        return
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    inside = column < channels
    total = tl.zeros([ROWS, TILE], tl.float32)
    for tap in range(TAPS):
        value = _inputs(
            x, states, row - (TAPS - 1) + tap, column, inside & (row < last), first, source,
            row_stride, state_stride, channels, TAPS,
        )  # fmt: skip
        total += value * tl.load(weight + tap * channels + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    place = out + row.to(tl.int64) * channels + column
    tl.store(place, total.to(out.dtype.element_ty), mask=inside & (row < last))
    if TAPS > 1 and tile == 0:
        kept = tl.arange(0, KEPT)[:, None]
        is_kept = inside & (kept < TAPS - 1)
        # Backwards: only the last iteration may overwrite the previous state.
        for back in range(tl.cdiv(end, PAGE) - before // PAGE):
            position = tl.minimum((tl.cdiv(end, PAGE) - back) * PAGE, end)
            target = left_in(table, position, end, num_blocks, PAGE)
            if target > 0:
                at = first + position - before - (TAPS - 1) + kept
                value = _inputs(
                    x, states, at, column, is_kept, first, source, row_stride, state_stride, channels, TAPS
                )
                # Other threads may still read what this one overwrites.
                tl.debug_barrier()
                tl.store(states + target * state_stride + kept * channels + column, value, mask=is_kept)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    silu: bool = False,
) -> Tensor:
    """See `ops.causal_conv`."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    taps, channels = weight.shape
    if out.numel():
        kept = next_power_of_2(taps - 1)
        rows = 1 if metadata.max_query_len == 1 else max(ROWS, kept)
        tiles = triton.cdiv(metadata.max_query_len, rows), triton.cdiv(channels, COLUMNS)
        _causal_conv[(len(metadata.seq_lens), *tiles)](
            out, x, weight, bias, states, *of_requests(metadata, states), x.stride(0), states.stride(0), channels,
            TAPS=taps, HAS_BIAS=bias is not None, SILU=silu, PAGE=metadata.block_size,
            ROWS=rows, KEPT=kept, TILE=COLUMNS,
        )  # fmt: skip
    return out


def of_requests(metadata: StateMetadata, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """Return the arguments that `state_rows` reads."""
    tables = metadata.block_tables
    return metadata.query_start_loc, metadata.seq_lens, metadata.kept, tables, tables.stride(0), len(states)


ELEMENTS = 2048
"""Approximate number of state elements per program."""


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
    """Process states [COUNT, TILE] of some channels."""
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
    """Process states [COUNT, TILE] of some channels of a head."""
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
