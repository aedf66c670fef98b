"""Attention over the paged cache as a function on tensors, with every check."""

import torch
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, check_features
from quire.kernels.cpu.calls import NOTHING, call, empty
from quire.kernels.cpu.checks import check_cache, check_heads, dtype_code, say


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
) -> Tensor:
    op = "paged_attention"
    code = dtype_code(op, "q", q)
    tokens, q_heads, *strides, size = check_heads(op, "q", q, q.dtype)
    heads = k_cache.shape[1] if k_cache.dim() == 4 else 0
    cache = check_cache(op, k_cache, v_cache, heads, size)
    if not heads or q_heads % heads or not q_heads or size % 8 or not size:
        raise ValueError(
            f"{op}: q is {say(q)}; its heads must be a multiple of the cache's {heads}, its head size of 8"
        )
    check_features(q, sliding_window, attention_chunk, soft_cap, alibi_slopes, sinks)
    starts, lengths, tables = metadata.query_start_loc, metadata.seq_lens, metadata.block_tables
    slopes, sink_scores = (of_heads(numbers) for numbers in (alibi_slopes, sinks))
    requests, width = check_batch(op, starts, lengths, tables)
    out = empty(q, tokens, q_heads, size)
    tensors = (out, q, k_cache, v_cache, starts, lengths, tables, slopes, sink_scores)
    sizes = (tokens, requests, width, q_heads, *strides, cache.blocks, heads, cache.block_size, size)
    window = (attention_chunk or sliding_window or 0, int(attention_chunk is not None))
    refused = call(op, tensors, *sizes, *window, scale, soft_cap or 0.0, code, cache.code)
    if refused:
        raise IndexError(bad_request(op, metadata, refused - 1, cache.blocks))
    return out


def of_heads(numbers: Tensor | None) -> Tensor:
    return NOTHING if numbers is None else numbers.float().contiguous()


def check_batch(op: str, starts: Tensor, lengths: Tensor, tables: Tensor) -> tuple[int, int]:
    """(requests, block ids of each)."""
    shape = tables.shape
    if len(shape) != 2 or lengths.shape != shape[:1] or starts.shape != (shape[0] + 1,):
        shapes = ", ".join(map(say, (starts, lengths, tables)))
        raise ValueError(f"{op}: metadata must be [R + 1], [R] and [R, blocks]; it is {shapes}")
    for tensor in (starts, lengths, tables):
        if tensor.dtype is not torch.int32 or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(f"{op}: metadata must be contiguous int32; it has {say(tensor)}")
    return shape[0], shape[1]


def bad_request(op: str, metadata: AttentionMetadata, request: int, num_blocks: int) -> str:
    """What is wrong with a request, the last one's successor if it is the batch, that a kernel has refused."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    if request == len(lengths):
        return f"{op}: query_start_loc {starts} does not fit the rows of q"
    row = metadata.block_tables[request].tolist()
    return (
        f"{op}: request {request} with rows [{starts[request]}, {starts[request + 1]}), {lengths[request]} "
        f"tokens and blocks {row} does not fit q or the cache of {num_blocks} blocks"
    )
