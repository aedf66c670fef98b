# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule, real-gated linear recurrent units and RWKV-7: a program iterates over a request's tokens.

S. Yang et al., "Gated Delta Networks" (2024, arXiv:2412.06464); S. De et al., "Griffin" (2024, arXiv:2402.19427);
B. Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (2025, arXiv:2503.14456).

Invariant: as in `scan`; gates are computed in tiles of fixed size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.triton.launch import next_power_of_2, num_warps
from quire.kernels.triton.scan import left_in, of_requests, softplus, state_rows

_SLOWEST = tl.constexpr(-0.6065306597126334)
"""-exp(-1/2): the logarithm of a decay is this, times a number in (0, 1)."""
_LEAST_LENGTH = tl.constexpr(1e-12)


@triton.jit
def _of_token(x, at, row_stride, channel, used):
    return tl.load(x + at * row_stride + channel, mask=used, other=0.0).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_blocks"])
def _rwkv7(
    out, r, w, k, v, a, of_heads, states, starts, lengths, kept_lens, tables, table_width, num_blocks,
    r_row, w_row, k_row, v_row, a_row, state_stride, size, eps, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Process one head, whose state is [D, D]: keys by values, the columns."""
    request, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, last, before, end, table, source = state_rows(
        starts, lengths, kept_lens, tables, table_width, request, num_blocks, PAGE
    )
    index = tl.arange(0, TILE)
    used, channel = index < size, head * size + index
    both = used[:, None] & used[None, :]
    place = channel[:, None] * size + index[None, :]
    state = tl.load(states + source * state_stride + place, mask=tl.where(source > 0, both, False), other=0.0)
    channels = heads * size
    unit_of = tl.load(of_heads + channel, mask=used, other=0.0)
    rate_of = tl.load(of_heads + channels + channel, mask=used, other=0.0)
    bonus_of = tl.load(of_heads + 2 * channels + channel, mask=used, other=0.0)
    weight = tl.load(of_heads + 3 * channels + channel, mask=used, other=0.0)
    bias = tl.load(of_heads + 4 * channels + channel, mask=used, other=0.0)
    for step in range(last - first):
        at = (first + step).to(tl.int64)
        asked, key = _of_token(r, at, r_row, channel, used), _of_token(k, at, k_row, channel, used)
        value, rate = _of_token(v, at, v_row, channel, used), _sigmoid(_of_token(a, at, a_row, channel, used))
        decay = tl.exp(_sigmoid(_of_token(w, at, w_row, channel, used)) * _SLOWEST)
        unit = key * unit_of
        unit /= tl.maximum(tl.sqrt(tl.sum(unit * unit)), _LEAST_LENGTH)
        key *= 1.0 + (rate - 1.0) * rate_of
        known = tl.sum(unit[:, None] * state, 0)
        state = (
            state * decay[:, None] - (unit * rate)[:, None] * known[None, :] + key[:, None] * value[None, :]
        )
        said = tl.sum(asked[:, None] * state, 0)
        centered = tl.where(used, said - tl.sum(said) / size, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centered * centered) / size + eps)
        result = centered * scale * weight + bias + tl.sum(asked * key * bonus_of) * value
        tl.store(out + at * channels + channel, result.to(out.dtype.element_ty), mask=used)
        target = left_in(table, before + step + 1, end, num_blocks, PAGE)
        if target > 0:
            tl.store(states + target * state_stride + place, state, mask=both)


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
    """See `ops.rwkv7`."""
    _, heads, size, _ = states.shape
    out = torch.zeros(r.shape, dtype=r.dtype, device=r.device)
    if out.numel():
        tile = next_power_of_2(size)
        _rwkv7[(len(metadata.seq_lens), heads)](
            out, r, w, k, v, a, of_heads, states, *of_requests(metadata, states),
            r.stride(0), w.stride(0), k.stride(0), v.stride(0), a.stride(0), states.stride(0), size, eps,
            PAGE=metadata.block_size, TILE=tile, num_warps=num_warps(tile * tile // 2),
        )  # fmt: skip
    return out


COLUMNS = 16
"""Values of a head, whose state columns a program holds."""
GATE_ROWS, GATE_COLUMNS, GATE_INPUTS = 16, 32, 32
CHANNELS = 128
_LEAST_SQUARE = tl.constexpr(1e-6)


@triton.jit
def _unit(x, index, used):
    """Return a vector of length 1."""
    value = tl.load(x + index, mask=used, other=0.0).to(tl.float32)
    return value / tl.sqrt(tl.sum(value * value) + _LEAST_SQUARE)


@triton.jit(do_not_specialize=["num_blocks"])
def _gated_delta(
    out, qkv, ba, rates, dt_bias, states, starts, lengths, kept_lens, tables, table_width, num_blocks,
    qkv_row, ba_row, state_stride, keys, values, key_heads, scale, strongest, least,
    PAGE: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Process some columns [KEYS, TILE] of a value head's state."""
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
    # A head's time steps: one for the whole state, or one for each row of it.
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
    """Write sigmoids of a head's channels times its weight [size, 2 * size]."""
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
    """Process some channels of a head."""
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
