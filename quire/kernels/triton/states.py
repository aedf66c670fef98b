"""What kernels of layers with a state share: whose state a program starts from, and where it leaves one; and the
convolution, whose state is its last inputs.

Invariant: these and their oracle, `quire.kernels.reference_states`, read a table of states in the same way. A block
that is no place for a state is neither read nor written. What a program reads of a state no other program replaces.
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
    """A request's rows [first, last), the tokens before them, those behind which it leaves its last state, its table,
    and the block of the state before its rows; 0: it starts here. A request of length 0 has no rows."""
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
    """The block in which a request leaves the state behind `position` tokens; 0: in none. Behind `end` are drafts."""
    is_left = ((position % PAGE == 0) | (position == end)) & (position <= end)
    return _place(tl.load(table + (position - 1) // PAGE, mask=is_left, other=0), num_blocks)


@triton.jit
def softplus(x):
    """log(1 + e^x), also where e^x is small beside 1."""
    small = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + small
    rounded = tl.where(whole == 1.0, 1.0, whole - 1.0)
    return tl.where(x > 20.0, x, tl.where(whole == 1.0, small, tl.log(whole) * (small / rounded)))


@triton.jit
def _inputs(
    x, states, at, column, inside, first, source, row_stride, state_stride, channels, TAPS: tl.constexpr
):
    """Inputs of rows `at` [M, 1], of which those before `first` are of the state."""
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
    """Some rows of a request; its first program leaves the states, for it alone reads the one before."""
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
        # Backwards: where the state before stands, if it is replaced, the first of them will.
        for back in range(tl.cdiv(end, PAGE) - before // PAGE):
            position = tl.minimum((tl.cdiv(end, PAGE) - back) * PAGE, end)
            target = left_in(table, position, end, num_blocks, PAGE)
            if target > 0:
                at = first + position - before - (TAPS - 1) + kept
                value = _inputs(
                    x, states, at, column, is_kept, first, source, row_stride, state_stride, channels, TAPS
                )
                # Other threads may read what this one will replace.
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
    """The arguments of a kernel that `state_rows` reads."""
    tables = metadata.block_tables
    return metadata.query_start_loc, metadata.seq_lens, metadata.kept, tables, tables.stride(0), len(states)
