# SPDX-License-Identifier: Apache-2.0
"""Step inputs computed on the device from the batch's rows there.

Invariant: a step needs one upload of int32 numbers (`staged`), whose layout `StagedStep` describes. The host has
validated rows and columns. Padding requests, at the end, have one token without a slot and a sequence of length 0, so
that every kernel of a decode step may process them.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

TILE = 256


class StagedStep(NamedTuple):
    """Upload of a step: R rows, R first positions, R + 1 query starts, and for N samples the request and the token that
    they follow; then other data.
    """

    numbers: Tensor
    """int32, in this order."""
    num_requests: int
    num_sampling: int


@triton.jit(do_not_specialize=["num_segments", "first_segment"])
def _write_segments(target, row_stride, staged, first_segment, num_segments, TILE: tl.constexpr):
    segment = staged + first_segment + tl.program_id(0)
    row = tl.load(segment).to(tl.int64)
    column = tl.load(segment + num_segments)
    source = tl.load(segment + 2 * num_segments)
    length = tl.load(segment + 3 * num_segments)
    offset = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = offset < length
    value = tl.load(staged + source + offset, mask=inside)
    tl.store(target + row * row_stride + column + offset, value, mask=inside)


@triton.jit(do_not_specialize=["num_requests"])
def _prepare_tokens(
    input_ids, positions, starts, lengths, staged, token_rows, num_requests, row_stride, TILE: tl.constexpr
):
    request, tile = tl.program_id(0), tl.program_id(1)
    if request >= num_requests:
        if tile == 0:
            tl.store(input_ids + request, 0)
            tl.store(positions + request, 0)
            tl.store(lengths + request, 0)
            tl.store(starts + request + 1, request + 1)
        return
    row = tl.load(staged + request).to(tl.int64)
    start = tl.load(staged + num_requests + request)
    first = tl.load(staged + 2 * num_requests + request)
    end = tl.load(staged + 2 * num_requests + request + 1)
    if tile == 0:
        tl.store(lengths + request, start + end - first)
        tl.store(starts + request + 1, end)
        if request == 0:
            tl.store(starts, 0)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < end - first
    position = start + column
    token = tl.load(token_rows + row * row_stride + position, mask=inside)
    tl.store(input_ids + first + column, token.to(tl.int64), mask=inside)
    tl.store(positions + first + column, position.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["num_requests"])
def _prepare_blocks(
    slots,
    tables,
    staged,
    block_rows,
    num_requests,
    row_stride,
    table_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    request, tile = tl.program_id(0), tl.program_id(1)
    if request >= num_requests:
        if tile == 0:
            tl.store(slots + request, -1)
        return
    row = tl.load(staged + request).to(tl.int64)
    start = tl.load(staged + num_requests + request)
    first = tl.load(staged + 2 * num_requests + request)
    num_queries = tl.load(staged + 2 * num_requests + request + 1) - first
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < num_queries
    position = start + column
    block = tl.load(block_rows + row * row_stride + position // BLOCK, mask=inside, other=0).to(tl.int64)
    tl.store(slots + first + column, block * BLOCK + position % BLOCK, mask=inside)
    used = column < tl.cdiv(start + num_queries, BLOCK)
    block = tl.load(block_rows + row * row_stride + column, mask=used)
    tl.store(tables + request.to(tl.int64) * table_stride + column, block, mask=used)


@triton.jit(do_not_specialize=["num_requests", "num_sampling"])
def _keep_sampled(token_rows, codes, staged, num_requests, num_sampling, row_stride, TILE: tl.constexpr):
    sample = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = sample < num_sampling
    request = tl.load(staged + 3 * num_requests + 1 + sample, mask=inside, other=0)
    row = tl.load(staged + request, mask=inside, other=0).to(tl.int64)
    start = tl.load(staged + num_requests + request, mask=inside, other=0)
    first = tl.load(staged + 2 * num_requests + request, mask=inside, other=0)
    behind = tl.load(staged + 3 * num_requests + 1 + num_sampling + sample, mask=inside, other=0)
    token = tl.maximum(tl.load(codes + sample, mask=inside, other=0), 0)
    tl.store(token_rows + row * row_stride + start + behind - first + 1, token.to(tl.int32), mask=inside)


def write_segments(
    target: Tensor, staged: Tensor, first_segment: int, num_segments: int, longest: int
) -> None:
    """Copy segments of `staged` into rows of `target` [rows, width] int32.

    From `first_segment` on, `staged` holds the rows of all segments, then their columns, the offsets of their values in
    `staged`, and their lengths, `longest` at most.
    """
    if num_segments:
        grid = (num_segments, triton.cdiv(longest, TILE))
        _write_segments[grid](target, target.stride(0), staged, first_segment, num_segments, TILE=TILE)


def prepare_tokens(
    input_ids: Tensor,
    positions: Tensor,
    starts: Tensor,
    lengths: Tensor,
    step: StagedStep,
    token_rows: Tensor,
    num_padded: int,
    max_query_len: int,
) -> None:
    """Write ids and positions [T] int64 of the step's tokens, query starts [R + 1] and sequence lengths [R] int32.

    token_rows [rows, columns] int32. The outputs are filled for `num_padded` requests, at least R.
    """
    grid = (num_padded, triton.cdiv(max_query_len, TILE))
    _prepare_tokens[grid](
        input_ids, positions, starts, lengths, step.numbers, token_rows, step.num_requests, token_rows.stride(0),
        TILE=TILE,
    )  # fmt: skip


def prepare_blocks(
    slots: Tensor,
    tables: Tensor,
    step: StagedStep,
    block_rows: Tensor,
    block_size: int,
    num_padded: int,
    max_query_len: int,
    max_seq_len: int,
) -> None:
    """Write slots [T] int64 of the step's tokens, and the used part of the block tables [R, width] int32, of one group.

    block_rows [rows, width] int32. The outputs are filled for `num_padded` requests, at least R.
    """
    columns = max(max_query_len, triton.cdiv(max_seq_len, block_size))
    grid = (num_padded, triton.cdiv(columns, TILE))
    _prepare_blocks[grid](
        slots, tables, step.numbers, block_rows, step.num_requests, block_rows.stride(0), tables.stride(0),
        BLOCK=block_size, TILE=TILE,
    )  # fmt: skip


def keep_sampled(token_rows: Tensor, codes: Tensor, step: StagedStep) -> None:
    """Write each sampled token into its row: codes [N] int64; negative ones are stored as 0."""
    if step.num_sampling:
        grid = (triton.cdiv(step.num_sampling, TILE),)
        _keep_sampled[grid](
            token_rows,
            codes,
            step.numbers,
            step.num_requests,
            step.num_sampling,
            token_rows.stride(0),
            TILE=TILE,
        )


COPY_TILE = 1024


@triton.jit
def _copy(target, source, pairs, block_size, TILE: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = offset < block_size
    origin, destination = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    value = tl.load(source + origin * block_size + offset, mask=inside)
    tl.store(target + destination * block_size + offset, value, mask=inside)


def copy_blocks(target: Tensor, source: Tensor, pairs: Tensor) -> None:
    """target[pairs[i, 1]] = source[pairs[i, 0]] for all i: both [blocks, ...] contiguous, pairs [N, 2] int64.

    Source blocks are not among the targets. `source` or `target` may be pinned host memory that the device can address.
    """
    if len(pairs):
        block_size = target[0].numel()
        grid = (len(pairs), triton.cdiv(block_size, COPY_TILE))
        _copy[grid](target.view(-1), source.view(-1), pairs, block_size, TILE=COPY_TILE)
