"""The gated delta rule and real-gated linear recurrent units: a program walks through a request's tokens.

S. Yang et al., "Gated Delta Networks" (2024, arXiv:2412.06464); S. De et al., "Griffin" (2024, arXiv:2402.19427).

Invariant: as in `scan`; gates are made in tiles of fixed size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.triton.launch import next_power_of_2
from quire.kernels.triton.states import left_in, of_requests, softplus, state_rows

COLUMNS = 16
"""Values of a head whose columns of the state a program holds."""
GATE_ROWS, GATE_COLUMNS, GATE_INPUTS = 16, 32, 32
CHANNELS = 128
_LEAST_SQUARE = tl.constexpr(1e-6)


@triton.jit
def _unit(x, index, used):
    """A vector of length 1."""
    value = tl.load(x + index, mask=used, other=0.0).to(tl.float32)
    return value / tl.sqrt(tl.sum(value * value) + _LEAST_SQUARE)


@triton.jit(do_not_specialize=["num_blocks"])
def _gated_delta(
    out, qkv, ba, rates, dt_bias, states, starts, lengths, kept_lens, tables, table_width, num_blocks,
    qkv_row, ba_row, state_stride, keys, values, key_heads, scale, strongest, least,
    PAGE: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Some columns [KEYS, TILE] of a value head's state."""
    request, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, last, before, end, table, source = state_rows(
        starts, lengths, kept_lens, tables, table_width, request, num_blocks, PAGE
    )
    index, column = tl.arange(0, KEYS), tl.program_id(2) * TILE + tl.arange(0, TILE)
    used, inside = index < keys, column < values
    both = used[:, None] & inside[None, :]
    place = (head * keys + index[:, None]) * values + column[None, :]
    state = tl.load(states + source * state_stride + place, mask=tl.where(source > 0, both, False), other=0.0)
    rate = tl.load(rates + head)
    # The time steps of a head, of which the whole state has one, or each row of it.
    clock = head * keys + index if BY_CHANNEL else head + 0 * index
    more = tl.load(dt_bias + clock, mask=used, other=0.0)
    key_head = head // (heads // key_heads)
    for step in range(last - first):
        at = (first + step).to(tl.int64)
        start = qkv + at * qkv_row
        query = _unit(start + key_head * keys, index, used) * scale
        key = _unit(start + (key_heads + key_head) * keys, index, used)
        value = start + 2 * key_heads * keys + head * values
        value = tl.load(value + column, mask=inside, other=0.0).to(tl.float32)
        strength = strongest / (1.0 + tl.exp(-tl.load(ba + at * ba_row + head).to(tl.float32)))
        time = tl.load(ba + at * ba_row + heads + clock, mask=used, other=0.0).to(tl.float32)
        decay = least / (1.0 + tl.exp(rate * (time + more))) if BOUNDED else rate * softplus(time + more)
        state *= tl.exp(decay)[:, None]
        change = (value - tl.sum(key[:, None] * state, 0)) * strength
        state += key[:, None] * change[None, :]
        result = tl.sum(query[:, None] * state, 0)
        tl.store(out + (at * heads + head) * values + column, result.to(out.dtype.element_ty), mask=inside)
        target = left_in(table, before + step + 1, end, num_blocks, PAGE)
        if target > 0:
            tl.store(states + target * state_stride + place, state, mask=both)


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
    """See `ops.gated_delta`."""
    _, heads, keys, values = states.shape
    out = torch.zeros(len(qkv), heads, values, dtype=qkv.dtype, device=qkv.device)
    if out.numel():
        key_heads = (qkv.shape[1] - heads * values) // (2 * keys)
        _gated_delta[(len(metadata.seq_lens), heads, triton.cdiv(values, COLUMNS))](
            out, qkv, ba, rates, dt_bias, states, *of_requests(metadata, states),
            qkv.stride(0), ba.stride(0), states.stride(0), keys, values, key_heads, keys**-0.5, strongest, least or 0.0,
            PAGE=metadata.block_size, KEYS=next_power_of_2(keys), TILE=COLUMNS,
            BY_CHANNEL=len(dt_bias) > heads, BOUNDED=least is not None,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _gates(
    out, x, weights, bias, rows, x_row, size, ROWS: tl.constexpr, TILE: tl.constexpr, INPUTS: tl.constexpr
):
    """Sigmoids of what a head's matrix [size, 2 * size] makes of its channels."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, head = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.program_id(2)
    used, inside = row < rows, column < 2 * size
    x_start = x + (row.to(tl.int64) * x_row)[:, None] + head * size
    w_start = weights + head * size * 2 * size + column[None, :]
    sums = tl.zeros([ROWS, TILE], tl.float32)
    for first in range(0, size, INPUTS):
        k = first + tl.arange(0, INPUTS)
        value = tl.load(x_start + k[None, :], mask=used[:, None] & (k < size)[None, :], other=0.0)
        weight = tl.load(
            w_start + (k * 2 * size)[:, None], mask=(k < size)[:, None] & inside[None, :], other=0.0
        )
        sums = tl.dot(value.to(tl.float32), weight, sums, input_precision="ieee")
    sums += tl.load(bias + head * 2 * size + column, mask=inside, other=0.0)[None, :]
    place = (row.to(tl.int64) * tl.num_programs(2) + head)[:, None] * 2 * size + column[None, :]
    tl.store(out + place, 1.0 / (1.0 + tl.exp(-sums)), mask=used[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def _rg_lru(
    out, x, gates, rates, states, starts, lengths, kept_lens, tables, table_width, num_blocks,
    x_row, state_stride, size, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some channels of a head."""
    request, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, last, before, end, table, source = state_rows(
        starts, lengths, kept_lens, tables, table_width, request, num_blocks, PAGE
    )
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside, channel = column < size, head * size + column
    state = tl.load(
        states + source * state_stride + channel, mask=tl.where(source > 0, inside, False), other=0.0
    )
    rate = tl.load(rates + channel, mask=inside, other=0.0)
    for step in range(last - first):
        at = (first + step).to(tl.int64)
        gate = gates + (at * heads + head) * 2 * size + column
        value = tl.load(x + at * x_row + channel, mask=inside, other=0.0).to(tl.float32)
        value *= tl.load(gate, mask=inside, other=0.0)
        decay = rate * tl.load(gate + size, mask=inside, other=0.0)
        following = tl.exp(decay) * state + tl.sqrt(1.0 - tl.exp(2.0 * decay)) * value
        state = tl.where((step == 0) & (source == 0), value, following)
        tl.store(out + at * heads * size + channel, state.to(out.dtype.element_ty), mask=inside)
        target = left_in(table, before + step + 1, end, num_blocks, PAGE)
        if target > 0:
            tl.store(states + target * state_stride + channel, state, mask=inside)


def rg_lru(
    x: Tensor, weights: Tensor, bias: Tensor, rates: Tensor, states: Tensor, metadata: StateMetadata
) -> Tensor:
    """See `ops.rg_lru`."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        heads, size, _ = weights.shape
        gates = torch.empty(len(x), heads, 2 * size, dtype=torch.float32, device=x.device)
        _gates[(triton.cdiv(len(x), GATE_ROWS), triton.cdiv(2 * size, GATE_COLUMNS), heads)](
            gates, x, weights, bias, len(x), x.stride(0), size,
            ROWS=GATE_ROWS, TILE=GATE_COLUMNS, INPUTS=GATE_INPUTS,
        )  # fmt: skip
        _rg_lru[(len(metadata.seq_lens), heads, triton.cdiv(size, CHANNELS))](
            out, x, gates, rates, states, *of_requests(metadata, states), x.stride(0), states.stride(0), size,
            PAGE=metadata.block_size, TILE=CHANNELS,
        )  # fmt: skip
    return out
