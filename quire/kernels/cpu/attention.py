# SPDX-License-Identifier: Apache-2.0
"""Wrappers with all checks: rotary embedding, KV cache writes and paged attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, check_features, check_last_seen
from quire.kernels.cpu.calls import (
    NOTHING,
    CacheLayout,
    HeadLayout,
    call,
    check_array,
    check_cache,
    check_heads,
    check_index,
    describe,
    dtype_code,
    empty,
)
from quire.kernels.cpu.elementwise import check_weight
from quire.kernels.cpu.library import DTYPE_CODES


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    op = "rotary_embedding"
    code = dtype_code(op, "q", q)
    queries, keys = check_heads(op, "q", q, q.dtype), check_heads(op, "k", k, q.dtype)
    num_positions, rot_dim = check_rotary(op, positions, {"q": queries, "k": keys}, cos_sin_cache)
    sizes = (queries.tokens, num_positions, rot_dim, *queries[1:4], *keys[1:4])
    refused = call(op, (q, k, positions, cos_sin_cache), *sizes, int(interleaved), code)
    if refused:
        raise IndexError(f"{op}: {refused} positions are outside the cache of {num_positions} positions")
    return q, k


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
) -> None:
    op = "write_kv"
    code = dtype_code(op, "k", k)
    keys, values = check_heads(op, "k", k, k.dtype), check_heads(op, "v", v, k.dtype)
    cache = _check_write(op, keys, values, k_cache, v_cache, slot_mapping)
    tensors = (k, v, k_cache, v_cache, slot_mapping, _check_scales(op, k_cache, scales))
    strides = (keys.token_stride, keys.head_stride, values.token_stride, values.head_stride)
    sizes = (cache.blocks, cache.block_size, keys.size)
    refused = call(op, tensors, keys.tokens, keys.heads, *strides, *sizes, code, cache.code)
    if refused:
        raise IndexError(
            f"{op}: {refused} slots are outside the cache of {cache.blocks * cache.block_size} slots"
        )


def rotary_and_write_kv(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
) -> None:
    op = "rotary_and_write_kv"
    code, dtype = dtype_code(op, "q", q), q.dtype
    queries, keys, values = (
        check_heads(op, "q", q, dtype),
        check_heads(op, "k", k, dtype),
        check_heads(op, "v", v, dtype),
    )
    num_positions, rot_dim = check_rotary(op, positions, {"q": queries, "k": keys}, cos_sin_cache)
    cache = _check_write(op, keys, values, k_cache, v_cache, slot_mapping)
    norm_code = _check_norms(op, q, k, q_norm, k_norm)
    norms = (NOTHING if q_norm is None else q_norm, NOTHING if k_norm is None else k_norm)
    given = _check_scales(op, k_cache, scales)
    tensors = (q, k, v, k_cache, v_cache, positions, cos_sin_cache, slot_mapping, given, *norms)
    layout = (*queries[1:4], *keys[1:4], values.token_stride, values.head_stride)
    sizes = (cache.blocks, cache.block_size, keys.size, int(interleaved), eps, code, cache.code, norm_code)
    refused = call(op, tensors, keys.tokens, num_positions, rot_dim, *layout, *sizes)
    if refused:
        bounds = f"{num_positions} positions and {cache.blocks * cache.block_size} slots"
        raise IndexError(f"{op}: {refused} tokens are outside the {bounds} of the caches")


def check_rotary(
    op: str, positions: Tensor, rotated: Mapping[str, HeadLayout], cache: Tensor
) -> tuple[int, int]:
    """Check the arguments; return the shape of the cos/sin table."""
    tokens = rotated["q"].tokens
    check_index(op, "positions", positions, tokens)
    shape = cache.shape
    if cache.dtype is not torch.float32 or len(shape) != 2 or shape[1] % 2 or not cache.is_contiguous():
        raise ValueError(f"{op}: cos_sin_cache must be float32 [P, even]; it is {describe(cache)}")
    num_positions, rot_dim = shape
    for name, heads in rotated.items():
        if heads.tokens != tokens or heads.size < rot_dim:
            found = f"[{heads.tokens}, {heads.heads}, {heads.size}]"
            raise ValueError(f"{op}: {name} must be [{tokens}, heads, >= {rot_dim}]; it is {found}")
    if not cache.is_cpu:
        raise ValueError(f"{op}: cos_sin_cache must be on the CPU, but is on {cache.device}")
    return num_positions, rot_dim


def _check_norms(op: str, q: Tensor, k: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> int:
    """Check the norms; return the code of the weights' dtype, or of q's without norms."""
    if q_norm is None and k_norm is None:
        return DTYPE_CODES[q.dtype]
    if q_norm is None or k_norm is None or q_norm.dtype is not k_norm.dtype or q.shape[2] != k.shape[2]:
        norms = " and ".join("none" if norm is None else describe(norm) for norm in (q_norm, k_norm))
        raise ValueError(
            f"{op}: norms of q and k must have one dtype, and their heads one size; they are {norms} "
            f"for {describe(q)} and {describe(k)}"
        )
    check_weight(op, "q_norm", q, q_norm)
    return check_weight(op, "k_norm", k, k_norm)


def _check_scales(op: str, k_cache: Tensor, scales: Tensor | None) -> Tensor:
    """Check the scales; return the tensor to pass to the kernel."""
    if scales is None:
        return NOTHING
    if k_cache.dtype is not torch.int8:
        raise TypeError(f"{op}: scales are for int8 caches; these are {k_cache.dtype}")
    check_array(op, "scales", scales, torch.float32, (2, k_cache.shape[1]))
    return scales


def _check_write(
    op: str, k: HeadLayout, v: HeadLayout, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> CacheLayout:
    if v.tokens != k.tokens or v.heads != k.heads or v.size != k.size:
        shapes = f"[{v.tokens}, {v.heads}, {v.size}] and [{k.tokens}, {k.heads}, {k.size}]"
        raise ValueError(f"{op}: v must be of k's shape; they are {shapes}")
    check_index(op, "slot_mapping", slots, k.tokens)
    return check_cache(op, k_cache, v_cache, k.heads, k.size)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    op = "paged_attention"
    code = dtype_code(op, "q", q)
    tokens, q_heads, *strides, size = check_heads(op, "q", q, q.dtype)
    heads = k_cache.shape[1] if k_cache.dim() == 4 else 0
    cache = check_cache(op, k_cache, v_cache, heads, size)
    if not heads or q_heads % heads or not q_heads or size % 8 or not size:
        raise ValueError(
            f"{op}: q is {describe(q)}; its heads must be a multiple of the cache's {heads}, its head size of 8"
        )
    check_features(q, sliding_window, attention_chunk, soft_cap, alibi_slopes, sinks, relative_bias)
    check_last_seen(metadata, len(q), attention_chunk)
    starts, lengths, tables = metadata.query_start_loc, metadata.seq_lens, metadata.block_tables
    slopes, sink_scores = (of_heads(numbers) for numbers in (alibi_slopes, sinks))
    requests, width = check_batch(op, starts, lengths, tables)
    out = empty(q, tokens, q_heads, size)
    last_seen = NOTHING if metadata.last_seen is None else metadata.last_seen
    if metadata.last_seen is not None:
        check_array(op, "last_seen", last_seen, torch.int32, (tokens,))
    biases = NOTHING if relative_bias is None else relative_bias.contiguous()
    center = 0 if relative_bias is None else relative_bias.shape[1] // 2
    tensors = (out, q, k_cache, v_cache, starts, lengths, tables, slopes, sink_scores, last_seen, biases)
    sizes = (tokens, requests, width, q_heads, *strides, cache.blocks, heads, cache.block_size, size)
    window = (attention_chunk or sliding_window or 0, int(attention_chunk is not None))
    refused = call(op, tensors, *sizes, *window, center, scale, soft_cap or 0.0, code, cache.code)
    if refused:
        biased = "" if relative_bias is None else f" or biases for {center + 1} tokens"
        raise IndexError(bad_request(op, metadata, refused - 1, cache.blocks) + biased)
    return out


def of_heads(numbers: Tensor | None) -> Tensor:
    return NOTHING if numbers is None else numbers.float().contiguous()


def check_batch(op: str, starts: Tensor, lengths: Tensor, tables: Tensor) -> tuple[int, int]:
    """Return (requests, block ids of each)."""
    shape = tables.shape
    if len(shape) != 2 or lengths.shape != shape[:1] or starts.shape != (shape[0] + 1,):
        shapes = ", ".join(map(describe, (starts, lengths, tables)))
        raise ValueError(f"{op}: metadata must be [R + 1], [R] and [R, blocks]; it is {shapes}")
    for tensor in (starts, lengths, tables):
        if tensor.dtype is not torch.int32 or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(f"{op}: metadata must be contiguous int32; it has {describe(tensor)}")
    return shape[0], shape[1]


def bad_request(op: str, metadata: AttentionMetadata, request: int, num_blocks: int) -> str:
    """Return what is wrong with a request that a kernel refused; an index past the last means the batch."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    if request == len(lengths):
        return f"{op}: query_start_loc {starts} does not fit the rows of q"
    row = metadata.block_tables[request].tolist()
    return (
        f"{op}: request {request} with rows [{starts[request]}, {starts[request + 1]}), {lengths[request]} "
        f"tokens and blocks {row} does not fit q, the cache of {num_blocks} blocks or last_seen"
    )
