# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention among a step's rows: concatenated sequences of different lengths.

T. Dao, "FlashAttention-2" (2023), without a causal mask and without a cache: keys and values are rows as queries are.
Tiles that are visible to all queries are processed without masks.

Invariant: a program owns BLOCK_Q tokens of one request and all query heads of one key-value head; it processes keys in
tiles that start at multiples of BLOCK_N. Tiles depend on the model alone, so a sequence has the same bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_metadata import GroupMetadata, check_bidirectional
from quire.kernels.triton.attention_kernels import LOG2_E, _request_of, load_where
from quire.kernels.triton.launch import next_power_of_2

BLOCK_N = 64


@triton.jit
def _tile(
    query, k, v, position, key_position, length, slope, bias_row, scale, window, center,
    k_token, v_token, dim, dim_used, row_used,
    PADDED: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return scores as exponents of 2 [M, N], and the values [N, D].

    MASKED, unless all keys exist and are visible to every query: scores are -inf for invisible keys. PADDED heads have
    fewer dimensions than tiles.
    """
    known = key_position < length
    token = key_position.to(tl.int64)
    key = load_where(
        k + token[None, :] * k_token + dim[:, None], known[None, :] & dim_used[:, None], MASKED or PADDED
    )
    value = load_where(
        v + token[:, None] * v_token + dim[None, :], known[:, None] & dim_used[None, :], MASKED or PADDED
    )
    score = tl.dot(query, key, input_precision="ieee") * scale
    distance = position[:, None] - key_position[None, :]
    if HAS_SLOPES:
        score -= slope[:, None] * tl.abs(distance).to(tl.float32)
    if HAS_BIAS:
        place = bias_row[:, None] + center - distance
        score += tl.load(place, mask=known[None, :] & row_used[:, None], other=0.0)
    score *= LOG2_E
    if MASKED:
        seen = known[None, :] & row_used[:, None]
        if HAS_WINDOW:
            seen &= tl.abs(distance) < window
        score = tl.where(seen, score, float("-inf"))
    return score, value


@triton.jit
def _stages(
    first_query, length, window, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Return the tile range of keys visible to any query of a tile, and within it the tiles visible to all."""
    begin, end, plain_begin = length * 0, length, length * 0
    plain_end = length // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        last_query = tl.minimum(first_query + BLOCK_Q, length) - 1
        begin = tl.maximum(first_query - window + 1, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(last_query + window, length)
        plain_begin = tl.cdiv(tl.maximum(last_query - window + 1, 0), BLOCK_N) * BLOCK_N
        plain_begin = tl.minimum(plain_begin, end)
        plain_end = tl.maximum(tl.minimum(first_query + window, length) // BLOCK_N * BLOCK_N, plain_begin)
    return begin, plain_begin, plain_end, end


@triton.jit(do_not_specialize=["num_requests", "window", "center"])
def _attend_rows(
    out, q, k, v, starts, slopes, biases, num_requests, scale, window, center,
    q_token, q_head, k_token, k_head, v_token, v_head,
    HEAD: tl.constexpr, HEAD_TILE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    block, kv_head = tl.program_id(0), tl.program_id(1)
    request = _request_of(starts, block, num_requests, BLOCK_Q)
    start = tl.load(starts + request)
    length = tl.load(starts + request + 1) - start
    first_query = (block - start // BLOCK_Q - request) * BLOCK_Q
    if first_query >= length:
        return

    row = tl.arange(0, BLOCK_M)
    position = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_used = (row < BLOCK_Q * GROUP) & (position < length)
    dim = tl.arange(0, HEAD_TILE)
    dim_used = dim < HEAD
    used = row_used[:, None] & dim_used[None, :]
    token = (start + position).to(tl.int64)
    query = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + dim[None, :], mask=used, other=0.0
    )
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=row_used, other=0.0).to(tl.float32)
    bias_row = biases + head * (2 * center + 1)

    begin, plain_begin, plain_end, end = _stages(first_query, length, window, BLOCK_Q, BLOCK_N, HAS_WINDOW)
    k += start.to(tl.int64) * k_token + kv_head * k_head
    v += start.to(tl.int64) * v_token + kv_head * v_head
    column = tl.arange(0, BLOCK_N)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, HEAD_TILE], tl.float32)
    for stage in tl.static_range(0 if HAS_WINDOW else 1, 3):
        stage_begin, stage_end = begin, plain_begin
        if stage == 1:
            stage_begin, stage_end = plain_begin, plain_end
        elif stage == 2:
            stage_begin, stage_end = plain_end, end
        for tile in range(stage_begin, stage_end, BLOCK_N):
            score, value = _tile(
                query, k, v, position, tile + column, length, slope, bias_row, scale, window, center,
                k_token, v_token, dim, dim_used, row_used,
                HEAD != HEAD_TILE, HAS_SLOPES, HAS_BIAS, HAS_WINDOW, stage != 1,
            )  # fmt: skip
            new_largest = tl.maximum(largest, tl.max(score, 1))
            reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weight = tl.exp2(score - reference[:, None])
            decay = tl.exp2(largest - reference)
            total = total * decay + tl.sum(weight, 1)
            mixed = mixed * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            largest = new_largest
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (token[:, None] * (tl.num_programs(1) * GROUP) + head[:, None]) * HEAD + dim[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=used)


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: GroupMetadata,
    scale: float,
    *,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """See `ops.bidirectional_attention`; whether requests are complete is on the device, and is not checked."""
    check_bidirectional(q, window, alibi_slopes, relative_bias)
    (tokens, heads, head_size), kv_heads = q.shape, k.shape[1]
    num_requests, group = len(metadata.seq_lens), heads // kv_heads
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # padding rows are not written
    if out.numel() == 0 or num_requests == 0:
        return out
    block_m = max(64, next_power_of_2(group))
    block_q = block_m // group
    center = 0 if relative_bias is None else relative_bias.shape[1] // 2
    _attend_rows[(tokens // block_q + num_requests, kv_heads)](
        out, q, k, v, metadata.query_start_loc, alibi_slopes,
        out if relative_bias is None else relative_bias.contiguous(),
        num_requests, scale, window or 0, center, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        HEAD=head_size, HEAD_TILE=max(16, next_power_of_2(head_size)), GROUP=group,
        BLOCK_M=block_m, BLOCK_Q=block_q, BLOCK_N=BLOCK_N if head_size <= 128 else BLOCK_N // 2,
        HAS_SLOPES=alibi_slopes is not None, HAS_BIAS=relative_bias is not None, HAS_WINDOW=window is not None,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
