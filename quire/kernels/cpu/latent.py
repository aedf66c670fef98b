# SPDX-License-Identifier: Apache-2.0
"""Wrappers of latent attention, with all checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cpu.attention import bad_request, check_batch, check_rotary
from quire.kernels.cpu.calls import call, check_heads, check_index, describe, dtype_code, empty
from quire.kernels.cpu.library import DTYPE_CODES
from quire.kernels.cpu.linear import BLOCK_ROWS, SCRATCH, checked
from quire.kernels.linear import PANEL, PackedWeight

_MAX_ROPE = 512
"""Largest number of rotated elements of a key, as in csrc/cpu/latent.cpp."""


class _Cache(NamedTuple):
    blocks: int
    block_size: int
    size: int
    code: int


def per_head_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    op = "per_head_linear"
    dtype_code(op, "x", x)
    matrix, (outputs, inputs, halves, *groups), kernel_format, padded = weight.native or checked(op, weight)
    wide = x.float()
    tokens, heads, *strides, size = check_heads(op, "x", wide, torch.float32)
    if size != inputs or halves != 1 or not heads or outputs % (heads * PANEL):
        raise ValueError(
            f"{op}: x is {describe(x)} and the weight [{outputs}, {inputs}] in {halves} parts; it must have whole"
            f" panels of {PANEL} for each head, and as many columns as x"
        )
    out = empty(wide, tokens, heads, outputs // heads)
    scratch = SCRATCH.of(min(tokens * heads, BLOCK_ROWS) * (padded + 1))
    sizes = (scratch.nbytes, tokens, heads, *strides, outputs, inputs, *groups)
    call(op, (out, wide, *matrix, scratch), *sizes, *kernel_format)
    return out if x.dtype is torch.float32 else out.to(x.dtype)


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
    op = "write_latents"
    code = dtype_code(op, "q", q)
    queries = check_heads(op, "q", q, q.dtype)
    num_positions, rope = check_rotary(op, positions, {"q": queries}, cos_sin_cache)
    kept = _check_cache(op, cache)
    rank = kept.size - rope
    if (
        norm.shape != (rank,)
        or not rank
        or not norm.is_contiguous()
        or norm.dtype not in (q.dtype, torch.float32)
    ):
        raise ValueError(
            f"{op}: norm must be contiguous [{rank}] of {q.dtype} or float32; it is {describe(norm)}"
        )
    if rows.shape != (queries.tokens, kept.size) or rows.dtype is not q.dtype or rows.stride(1) != 1:
        raise ValueError(
            f"{op}: rows must be {q.dtype} [{queries.tokens}, {kept.size}]; they are {describe(rows)}"
        )
    if not (norm.is_cpu and rows.is_cpu):
        raise ValueError(f"{op}: norm and rows must be on the CPU")
    if queries.size != rope or rope > _MAX_ROPE:
        raise ValueError(
            f"{op}: all {queries.size} dimensions of q, at most {_MAX_ROPE}, are rotated; the table has {rope}"
        )
    check_index(op, "slot_mapping", slot_mapping, queries.tokens)
    num_slots = kept.blocks * kept.block_size
    tensors = (q, rows, norm, positions, cos_sin_cache, cache, slot_mapping)
    sizes = (queries.tokens, num_positions, rank, rope, *queries[1:4], rows.stride(0), num_slots)
    codes = (code, kept.code, DTYPE_CODES[norm.dtype])
    refused = call(op, tensors, *sizes, int(interleaved), eps, *codes)
    if refused:
        bounds = f"{num_positions} positions and {num_slots} slots"
        raise IndexError(f"{op}: {refused} tokens are outside the {bounds} of the caches")


def latent_attention(
    q: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    op = "latent_attention"
    code = dtype_code(op, "q", q)
    tokens, heads, *strides, rank = check_heads(op, "q", q, q.dtype)
    rotated = check_heads(op, "q_rope", q_rope, q.dtype)
    kept = _check_cache(op, cache)
    if rotated[:2] != (tokens, heads) or rank + rotated.size != kept.size or not heads:
        raise ValueError(
            f"{op}: q {describe(q)} and q_rope {describe(q_rope)} do not meet a cache {describe(cache)}"
        )
    if rank % 16 or rotated.size % 8 or not rank:
        raise ValueError(
            f"{op}: q must have a multiple of 16, and q_rope one of 8; they are {describe(q)}, {describe(q_rope)}"
        )
    starts, lengths, tables = metadata.query_start_loc, metadata.seq_lens, metadata.block_tables
    requests, width = check_batch(op, starts, lengths, tables)
    out = empty(q, tokens, heads, rank)
    tensors = (out, q, q_rope, cache, starts, lengths, tables)
    of_rope = (rotated.token_stride, rotated.head_stride)
    sizes = (
        tokens,
        requests,
        width,
        heads,
        *strides,
        *of_rope,
        kept.blocks,
        kept.block_size,
        rank,
        rotated.size,
    )
    refused = call(op, tensors, *sizes, scale, code, kept.code)
    if refused:
        raise IndexError(bad_request(op, metadata, refused - 1, kept.blocks))
    return out


def _check_cache(op: str, cache: Tensor) -> _Cache:
    code = dtype_code(op, "cache", cache)
    if cache.dim() != 3 or not cache.is_contiguous() or not cache.shape[1]:
        raise ValueError(
            f"{op}: the cache must be contiguous [blocks, block size, size]; it is {describe(cache)}"
        )
    blocks, block_size, size = cache.shape
    return _Cache(blocks, block_size, size, code)
