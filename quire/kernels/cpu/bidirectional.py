# SPDX-License-Identifier: Apache-2.0
"""Wrapper of bidirectional attention, with all checks."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.attention_metadata import GroupMetadata, check_bidirectional
from quire.kernels.cpu.attention import check_batch, of_heads
from quire.kernels.cpu.calls import NOTHING, call, check_heads, describe, dtype_code, empty


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
    op = "bidirectional_attention"
    code = dtype_code(op, "q", q)
    tokens, q_heads, *q_strides, size = check_heads(op, "q", q, q.dtype)
    keys, values = check_heads(op, "k", k, q.dtype), check_heads(op, "v", v, q.dtype)
    heads = keys.heads
    fits = (
        keys.tokens == values.tokens == tokens and values.heads == heads and keys.size == values.size == size
    )
    if not fits or not heads or q_heads % heads or not q_heads or size % 8 or not size:
        raise ValueError(
            f"{op}: q, k and v are {describe(q)}, {describe(k)} and {describe(v)}; they must have the same tokens"
            " and head size, a multiple of 8, and q a multiple of the heads of k and v"
        )
    check_bidirectional(q, window, alibi_slopes, relative_bias)
    starts, lengths = metadata.query_start_loc, metadata.seq_lens
    requests, _ = check_batch(op, starts, lengths, metadata.block_tables)
    biases = NOTHING if relative_bias is None else relative_bias.contiguous()
    center = 0 if relative_bias is None else relative_bias.shape[1] // 2
    out = empty(q, tokens, q_heads, size)
    refused = call(
        op,
        (out, q, k, v, starts, lengths, of_heads(alibi_slopes), biases),
        *(tokens, requests, q_heads, *q_strides, heads, keys.token_stride, keys.head_stride),
        *(values.token_stride, values.head_stride, size, window or 0, center, scale, code),
    )
    if refused:
        raise IndexError(_bad_sequence(op, metadata, refused - 1, center))
    return out


def _bad_sequence(op: str, metadata: GroupMetadata, request: int, center: int) -> str:
    """Return what is wrong with a request that the kernel refused; an index past the last means the batch."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    if request == len(lengths):
        return f"{op}: query_start_loc {starts} does not fit the rows of q"
    rows = starts[request + 1] - starts[request]
    if rows != lengths[request]:
        return f"{op}: request {request} has {rows} rows of {lengths[request]} tokens"
    return f"{op}: request {request} has {rows} tokens, and there are biases for {center + 1}"
