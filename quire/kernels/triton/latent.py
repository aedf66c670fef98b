# SPDX-License-Identifier: Apache-2.0
"""Latent attention in its absorbed form: per-head matmuls, the write of latents, and attention over them.

DeepSeek-V2 (2024, arXiv:2405.04434). All heads read the same vectors, so the rows of a tile are tokens times heads, and
a tile of latents is loaded once, as keys and as values.

Invariant: tiles follow from the model, and keys are split into parts at multiples of SPLIT_TOKENS, which are joined in
order: sequentially by one program or, if a decode step has too few programs, in parallel, with the same bits. So no bit
depends on the batch, or on prompt chunking.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.linear import PackedWeight
from quire.kernels.triton import launch
from quire.kernels.triton.attention import PARTS_AT_ONCE, is_decode
from quire.kernels.triton.attention_kernels import LOG2_E, joined, joined_in_order
from quire.kernels.triton.codes import book_of, has_own_matmul
from quire.kernels.triton.elementwise import normed
from quire.kernels.triton.launch import next_power_of_2, num_warps
from quire.kernels.triton.matmul_tile import BLOCK_M, BLOCK_N, format_options, matmul_tile
from quire.kernels.triton.quantize import quantize_rows

SPLIT_TOKENS = 1024
KEYS = 32
"""Keys per tile."""
MAX_PARTS_BYTES = 1 << 28
"""Largest memory of parts that are computed in parallel, in bytes."""


@triton.jit(do_not_specialize=["tokens"])
def _per_head(
    out, x, x_scales, token_stride, head_stride, data, scales, zeros, book, tokens, outputs, inputs,
    OWN: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2)
    used, column_used = token < tokens, column < outputs
    if OWN and KIND == "fp8":
        x_scales += head * tokens
    sums = matmul_tile(
        x + head * head_stride, x_scales, token, token_stride, used, data, scales, zeros, book,
        head * outputs + column, column_used, tl.num_programs(2) * outputs, inputs,
        OWN, PAIRS, WHOLE, KIND, GROUP, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    place = (token.to(tl.int64) * tl.num_programs(2) + head)[:, None] * outputs + column[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=used[:, None] & column_used[None, :])


def per_head_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """See `ops.per_head_linear`."""
    tokens, heads, inputs = x.shape
    outputs = weight.outputs // heads
    out = torch.empty(tokens, heads, outputs, dtype=x.dtype, device=x.device)
    if out.numel():
        scales = None
        if weight.scheme.kind == "fp8" and has_own_matmul(weight):
            rows = quantize_rows(x.flatten(0, 1))
            x, scales = rows.values.view(x.shape), rows.scales.view(tokens, heads).t().contiguous()
        grid = (triton.cdiv(tokens, BLOCK_M), triton.cdiv(outputs, BLOCK_N), heads)
        _per_head[grid](
            out, x, scales, x.stride(0), x.stride(1), weight.data, weight.scales, weight.zeros,
            book_of(weight), tokens, outputs, inputs, **format_options(weight, x.dtype),
        )  # fmt: skip
    return out


@triton.jit
def _rotated_pairs(start, pair, half, cos, sin, INTERLEAVED: tl.constexpr):
    """Return the rotated first and second elements of the pairs at `start`, in float32, and their offsets."""
    inside = pair < half
    first = pair * 2 if INTERLEAVED else pair
    second = pair * 2 + 1 if INTERLEAVED else pair + half
    a = tl.load(start + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(start + second, mask=inside, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin, first, second


@triton.jit
def _write_latents(
    positions, q, rows, norm, table, cache, slots, rank, half, eps, q_token, q_head, row_token, heads,
    INTERLEAVED: tl.constexpr, RANK_TILE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate a token's queries, one per program, and write its latent and key, in the last program."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)
    inside = pair < half
    angles = table + tl.load(positions + token) * 2 * half + pair
    cos, sin = tl.load(angles, mask=inside, other=0.0), tl.load(angles + half, mask=inside, other=0.0)
    if head < heads:
        start = q + token * q_token + head * q_head
        a, b, first, second = _rotated_pairs(start, pair, half, cos, sin, INTERLEAVED)
        tl.store(start + first, a, mask=inside)
        tl.store(start + second, b, mask=inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            start, target = rows + token * row_token, cache + slot * (rank + 2 * half)
            dim = tl.arange(0, RANK_TILE)
            value = tl.load(start + dim, mask=dim < rank, other=0.0).to(tl.float32)
            # Stored values are rounded to the activations' dtype before the cache's.
            latent = normed(value, norm, dim, dim < rank, rank, eps).to(rows.dtype.element_ty)
            tl.store(target + dim, latent.to(cache.dtype.element_ty), mask=dim < rank)
            a, b, first, second = _rotated_pairs(start + rank, pair, half, cos, sin, INTERLEAVED)
            a, b = a.to(rows.dtype.element_ty), b.to(rows.dtype.element_ty)
            tl.store(target + rank + first, a.to(cache.dtype.element_ty), mask=inside)
            tl.store(target + rank + second, b.to(cache.dtype.element_ty), mask=inside)


def write_latents(
    positions: Tensor,
    q: Tensor,
    rows: Tensor,
    norm: Tensor,
    cos_sin_cache: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool = False,
) -> None:
    """See `ops.write_latents`; positions and slots come checked from the runner."""
    tokens, heads, rope = q.shape
    if tokens:
        tile = next_power_of_2(len(norm))
        _write_latents[(tokens, heads + 1)](
            positions, q, rows, norm, cos_sin_cache, cache, slot_mapping, len(norm), rope // 2, eps,
            q.stride(0), q.stride(1), rows.stride(0), heads,
            INTERLEAVED=interleaved, RANK_TILE=tile, HALF=next_power_of_2(rope // 2), num_warps=num_warps(tile),
        )  # fmt: skip


@triton.jit
def _rows_of(starts, num_requests, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, DECODE: tl.constexpr):
    """Return this program's request, the request's first token and number of queries, and the program's first row.

    A request's rows are its queries times heads. If requests have any number of queries, each gets one tile more than
    it may
    need: its first is starts[r] * HEADS // BLOCK_M + r.
    """
    tile = tl.program_id(0)
    if DECODE:
        TILES: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
        return tile // TILES, tile // TILES, tile * 0 + 1, tile % TILES * BLOCK_M
    else:
        low, high = tile * 0, num_requests
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(starts + middle) * HEADS // BLOCK_M + middle <= tile:
                low = middle
            else:
                high = middle
        start = tl.load(starts + low)
        return (
            low,
            start,
            tl.load(starts + low + 1) - start,
            (tile - start * HEADS // BLOCK_M - low) * BLOCK_M,
        )


@triton.jit
def _part(
    query, query_rope, cache, table, position, begin, end, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, RANK_TILE: tl.constexpr, ROPE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the largest score, mass and unscaled sum of rows [M] over the keys from `begin` to `end`."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, RANK_TILE], tl.float32)
    column, dim, rope_dim = tl.arange(0, BLOCK_N), tl.arange(0, RANK_TILE), tl.arange(0, ROPE_TILE)
    for tile in range(begin, end, BLOCK_N):
        key_position = tile + column
        known = key_position < end
        block = tl.load(table + key_position // PAGE, mask=known, other=0).to(tl.int64)
        start = cache + ((block * PAGE + key_position % PAGE) * (RANK + ROPE))[:, None]
        latent = tl.load(start + dim[None, :], mask=known[:, None] & (dim < RANK)[None, :], other=0.0)
        key = tl.load(
            start + RANK + rope_dim[None, :], mask=known[:, None] & (rope_dim < ROPE)[None, :], other=0.0
        )
        latent, key = latent.to(query.dtype), key.to(query.dtype)
        score = tl.dot(query, tl.trans(latent), input_precision="ieee")
        score = tl.dot(query_rope, tl.trans(key), score, input_precision="ieee") * scale
        seen = known[None, :] & (key_position[None, :] <= position[:, None])
        score = tl.where(seen, score * LOG2_E, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight, decay = tl.exp2(score - reference[:, None]), tl.exp2(largest - reference)
        total = total * decay + tl.sum(weight, 1)
        mixed = mixed * decay[:, None] + tl.dot(weight.to(latent.dtype), latent, input_precision="ieee")
        largest = new_largest
    return largest, total, mixed


@triton.jit(do_not_specialize=["num_requests", "num_parts"])
def _attend(
    out, parts, q, q_rope, cache, starts, lengths, tables, num_requests, num_parts, scale,
    q_token, q_head, rope_token, rope_head, table_width,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    RANK_TILE: tl.constexpr, ROPE_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, DECODE: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    request, start, num_queries, first_row = _rows_of(starts, num_requests, HEADS, BLOCK_M, DECODE)
    if first_row >= num_queries * HEADS:
        return
    length = tl.load(lengths + request)
    history = length - num_queries
    end = tl.minimum(length, history + (first_row + BLOCK_M - 1) // HEADS + 1)
    first_part, last_part = 0, tl.cdiv(end, SPLIT_TOKENS)
    if SIDE_BY_SIDE:
        first_part = tl.program_id(1)
        if first_part >= last_part:
            return
        last_part = first_part + 1

    row = first_row + tl.arange(0, BLOCK_M)
    used = row < num_queries * HEADS
    token, head = (start + row // HEADS).to(tl.int64), row % HEADS
    dim, rope_dim = tl.arange(0, RANK_TILE), tl.arange(0, ROPE_TILE)
    inside = used[:, None] & (dim < RANK)[None, :]
    query = tl.load(q + (token * q_token + head * q_head)[:, None] + dim[None, :], mask=inside, other=0.0)
    query_rope = tl.load(
        q_rope + (token * rope_token + head * rope_head)[:, None] + rope_dim[None, :],
        mask=used[:, None] & (rope_dim < ROPE)[None, :],
        other=0.0,
    )
    table = tables + request.to(tl.int64) * table_width
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, RANK_TILE], tl.float32)
    for part in range(first_part, last_part):
        begin = part * SPLIT_TOKENS
        part_largest, part_total, part_mixed = _part(
            query, query_rope, cache, table, history + row // HEADS, begin, tl.minimum(begin + SPLIT_TOKENS, end),
            scale, RANK, ROPE, PAGE, RANK_TILE, ROPE_TILE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        largest, total, mixed = joined(largest, total, mixed, part_largest, part_total, part_mixed)

    out_row = token * HEADS + head
    if SIDE_BY_SIDE:
        # parts [T, Hq, parts, R + 2]: the sum, its mass and its largest score.
        place = parts + (out_row * num_parts + first_part) * (RANK + 2)
        tl.store(place[:, None] + dim[None, :], mixed, mask=inside)
        tl.store(place + RANK, total, mask=used)
        tl.store(place + RANK + 1, largest, mask=used)
    else:
        mixed /= tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + out_row[:, None] * RANK + dim[None, :], mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_parts"])
def _join(
    out, parts, lengths, num_parts,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, SPLIT_TOKENS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Join the parts of a request's only token, for one head, in key order."""
    request, head = tl.program_id(0), tl.program_id(1)
    row = request.to(tl.int64) * tl.num_programs(1) + head
    dim = tl.arange(0, RANK_TILE)[None, :]
    largest = tl.full([1], float("-inf"), tl.float32)
    total, mixed = tl.zeros([1], tl.float32), tl.zeros([1, RANK_TILE], tl.float32)
    used_parts = tl.cdiv(tl.load(lengths + request), SPLIT_TOKENS)
    for first_part in range(0, used_parts, TILE):
        part = first_part + tl.arange(0, TILE)
        place = parts + (row * num_parts + part) * (RANK + 2)
        largest, total, mixed = joined_in_order(
            largest, total, mixed, place, part < used_parts, RANK, dim, dim < RANK, TILE
        )
    mixed /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row * RANK + dim, mixed.to(out.dtype.element_ty), mask=dim < RANK)


def latent_attention(
    q: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `ops.latent_attention`."""
    (tokens, heads, rank), (_, page, size) = q.shape, cache.shape
    num_requests, decode = len(metadata.seq_lens), is_decode(q, metadata)
    # Padding rows are not written, unless each row has a request.
    out = (torch.empty if decode else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0 or num_requests == 0:
        return out
    block_m = 32 if heads >= 32 else 16
    tiles = num_requests * triton.cdiv(heads, block_m) if decode else tokens * heads // block_m + num_requests
    num_parts = triton.cdiv(metadata.max_seq_len, SPLIT_TOKENS)
    side_by_side = (
        decode
        and num_parts > 1
        and tiles < 2 * launch.num_processors(q.device)
        and out.numel() * num_parts * 4 <= MAX_PARTS_BYTES
    )
    parts_shape = (tokens, heads, num_parts, rank + 2) if side_by_side else (0,)
    parts = torch.empty(parts_shape, dtype=torch.float32, device=q.device)
    rank_tile = max(16, next_power_of_2(rank))
    _attend[(tiles, num_parts if side_by_side else 1)](
        out, parts, q, q_rope, cache, metadata.query_start_loc, metadata.seq_lens, metadata.block_tables,
        num_requests, num_parts, scale, q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1),
        metadata.block_tables.stride(0),
        HEADS=heads, RANK=rank, ROPE=size - rank, PAGE=page, RANK_TILE=rank_tile,
        ROPE_TILE=max(16, next_power_of_2(size - rank)), BLOCK_M=block_m, BLOCK_N=KEYS,
        SPLIT_TOKENS=SPLIT_TOKENS, DECODE=decode, SIDE_BY_SIDE=side_by_side,
        num_warps=8 if block_m * rank_tile > 8192 else 4, num_stages=2,
    )  # fmt: skip
    if side_by_side:
        _join[(num_requests, heads)](
            out,
            parts,
            metadata.seq_lens,
            num_parts,
            RANK=rank,
            RANK_TILE=rank_tile,
            SPLIT_TOKENS=SPLIT_TOKENS,
            TILE=PARTS_AT_ONCE,
        )
    return out
