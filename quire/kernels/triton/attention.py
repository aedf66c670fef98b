# SPDX-License-Identifier: Apache-2.0
"""Paged attention: launches and tile shapes for a batch.

T. Dao, "FlashAttention-2" (2023): online softmax over tiles of keys. W. Kwon et al., "Efficient memory management for
large language model serving with PagedAttention" (2023). The query heads of one key-value head (J. Ainslie et al.,
"GQA", 2023) form the rows of one tile, which uses the tensor cores in decode too. T. Dao et al., "Flash-Decoding"
(2023): requests with one query are split along their keys, and a second kernel joins the parts.

Requests with one query and those with more have separate launches, in every batch. So a mixed step costs the sum of its
decodes and prefills, and a decoding request gets the same bits with and without prefills in the batch.

Invariant: a launch depends on the number of requests and the longest possible sequence, and not on the lengths, so it
can be captured and replayed; the parts of a request depend on its own length alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, check_features, check_last_seen
from quire.kernels.triton import attention_kernels, launch
from quire.kernels.triton.attention_kernels import FEW_PARTS
from quire.kernels.triton.launch import next_power_of_2


class Shape(NamedTuple):
    """Tiling of requests into programs."""

    one_query: bool
    """True for requests with one query and one or more programs each; False for those with more queries."""
    block_m: int
    block_n: int
    part_tokens: int = 0
    """Keys per part, a multiple of `block_n`; 0: no parts."""
    most_parts: int = 0
    """Largest number of equal parts of a visible sequence, see `attention_kernels`; 0: all parts have one size."""
    num_warps: int = 4
    num_stages: int = 2


MAX_LAUNCH_PARTS = 32
PART_TOKENS = 256
INVARIANT_PART_TOKENS = 1024
MIN_PROGRAMS_OF_A_REQUEST = 8
"""Programs over which a long request's parts are split even if short requests fill the device. They exit at once if
they
have no part: on an H100 ten thousand take 4 microseconds.
"""
PARTS_AT_ONCE = 8
"""Parts of a request loaded together when they are joined in order."""
WAVES = 64
"""Largest number of programs per multiprocessor; beyond it, programs loop over parts."""


def decode_shape(group: int, head_size: int) -> Shape:
    """Return the shape for requests with one query each: enough parts that 8 key-value heads fill a large GPU twice."""
    block_m = max(16, next_power_of_2(group))
    block_n = 64 if head_size <= 128 else 32
    return Shape(True, block_m, block_n, PART_TOKENS, MAX_LAUNCH_PARTS, num_warps=4, num_stages=2)


def prefill_shape(q: Tensor, group: int, max_query_len: int) -> Shape:
    """Return the shape for prompts: large tiles, which keep the tensor cores busy, or a smaller one for short chunks.

    q [T, Hq, D]: the largest tile of float32 would not fit into shared memory.
    """
    head_size, rows = q.shape[2], max_query_len * group
    if rows >= 256 and head_size <= 128 and q.element_size() == 2:
        return Shape(False, max(256, next_power_of_2(group)), 64, num_warps=8, num_stages=3)
    large = rows >= 128 and head_size <= 128
    block_m = max(128 if large else 64, next_power_of_2(group))
    return Shape(False, block_m, 64 if head_size <= 128 else 32, num_warps=8 if large else 4, num_stages=3)


def invariant_shape(group: int, *, one_query: bool) -> Shape:
    """Return the same tiles and parts for every batch, so that sums do not depend on the batch or on prompt chunking.

    Parts of one query are computed in parallel, those of a prompt one after the other.
    """
    return Shape(
        one_query, max(64, next_power_of_2(group)), 32, INVARIANT_PART_TOKENS, num_warps=4, num_stages=2
    )


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
    """See `ops.paged_attention`; uses the fastest shapes for the batch."""
    group = q.shape[1] // k_cache.shape[1]
    shapes = decode_shape(group, q.shape[2]), prefill_shape(q, group, metadata.max_query_len)
    return attend(
        q,
        k_cache,
        v_cache,
        metadata,
        scale,
        *shapes,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        relative_bias=relative_bias,
    )


def invariant_paged_attention(
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
    """Compute `paged_attention` with the same bits in every batch and chunking."""
    group = q.shape[1] // k_cache.shape[1]
    shapes = invariant_shape(group, one_query=True), invariant_shape(group, one_query=False)
    return attend(
        q,
        k_cache,
        v_cache,
        metadata,
        scale,
        *shapes,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        relative_bias=relative_bias,
    )


def is_decode(q: Tensor, metadata: AttentionMetadata) -> bool:
    """Return whether every request r has exactly one row, r."""
    return metadata.max_query_len == 1 and len(metadata.seq_lens) == len(q)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    decode: Shape,
    prompt: Shape,
    *,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """Launch requests with one query in the first shape, others in the second; only launches that the batch
    may need."""
    check_features(q, sliding_window, attention_chunk, soft_cap, alibi_slopes, sinks, relative_bias)
    check_last_seen(metadata, len(q), attention_chunk)
    only_decodes, num_requests = is_decode(q, metadata), len(metadata.seq_lens)
    # Padding rows are not written, unless each row has a request.
    out = (torch.empty if only_decodes else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0 or num_requests == 0:
        return out
    window = attention_chunk or sliding_window or 0
    call = _AttentionCall(
        q,
        k_cache,
        v_cache,
        metadata,
        scale,
        window,
        attention_chunk is not None,
        soft_cap,
        alibi_slopes,
        sinks,
        relative_bias,
    )
    apart = num_requests > 1 or only_decodes
    if apart:
        _launch(call, out, decode, 1)
    if not only_decodes:
        _launch(call, out, prompt, 2 if apart else 1)
    return out


class _AttentionCall(NamedTuple):
    """Arguments of a batch."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    scale: float
    window: int
    is_chunked: bool
    soft_cap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    relative_bias: Tensor | None


def _launch(call: _AttentionCall, out: Tensor, shape: Shape, fewest_queries: int) -> None:
    """Write the rows of the requests for this shape with at least `fewest_queries` queries."""
    q, k_cache, v_cache, metadata, scale, window, is_chunked, soft_cap, slopes, sinks, biases = call
    (tokens, heads, head_size), (_, kv_heads, _, page) = q.shape, k_cache.shape
    num_requests, group = len(metadata.seq_lens), heads // kv_heads
    block_q = shape.block_m // group
    is_split = shape.one_query and shape.part_tokens > 0
    num_parts = _num_parts(shape, metadata.max_seq_len) if is_split else 0
    parts = torch.empty(num_requests, heads, num_parts, head_size + 2, dtype=torch.float32, device=q.device)
    blocks = num_requests if shape.one_query else tokens // block_q + num_requests
    most_at_once = WAVES * launch.num_processors(q.device) // (blocks * kv_heads)
    num_programs = min(max(most_at_once, MIN_PROGRAMS_OF_A_REQUEST), max(num_parts, 1))
    head_tile = max(16, next_power_of_2(head_size))
    starts, lengths = metadata.query_start_loc, metadata.seq_lens
    # The only query of a request is at its last position, and sees nothing behind it.
    last_seen = None if shape.one_query else metadata.last_seen
    attention_kernels.attend[(kv_heads, blocks, num_programs)](
        out, parts, q, k_cache, v_cache, starts, lengths, metadata.block_tables, slopes, sinks, last_seen,
        out if biases is None else biases.contiguous(), 0 if biases is None else biases.shape[1] // 2,
        num_requests, fewest_queries, scale, soft_cap or 0.0, window, shape.part_tokens, shape.most_parts, num_parts,
        q.stride(0), q.stride(1), metadata.block_tables.stride(0), *k_cache.stride(), *v_cache.stride(),
        HEAD=head_size, HEAD_TILE=head_tile, GROUP=group, PAGE=page,
        BLOCK_M=shape.block_m, BLOCK_Q=block_q, BLOCK_N=shape.block_n, ONE_QUERY=shape.one_query,
        PARTS=shape.part_tokens > 0, EVEN=shape.most_parts > 0,
        HAS_CAP=soft_cap is not None, HAS_SLOPES=slopes is not None, HAS_BIAS=biases is not None,
        HAS_SINKS=sinks is not None, HAS_WINDOW=window > 0, CHUNKED=is_chunked, HAS_LAST=last_seen is not None,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if is_split:
        attention_kernels.join_parts[(heads, num_requests)](
            out, parts, starts, lengths, sinks, window, shape.part_tokens, shape.most_parts, num_parts,
            HEAD=head_size, HEAD_TILE=head_tile, BLOCK_N=shape.block_n, EVEN=shape.most_parts > 0,
            TILE=next_power_of_2(shape.most_parts) if shape.most_parts else PARTS_AT_ONCE,
            HAS_SINKS=sinks is not None, HAS_WINDOW=window > 0, CHUNKED=is_chunked,
        )  # fmt: skip


def _num_parts(shape: Shape, max_seq_len: int) -> int:
    """Return the largest possible number of parts."""
    most = triton.cdiv(max_seq_len, shape.part_tokens)
    few = min(FEW_PARTS.value, triton.cdiv(max_seq_len, shape.block_n))
    return max(few, min(most, shape.most_parts)) if shape.most_parts else most
