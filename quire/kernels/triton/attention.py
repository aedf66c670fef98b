"""Paged attention: one kernel in three launch shapes (decode, split decode, prefill and mixed).

T. Dao, "FlashAttention-2" (2023): online softmax over tiles of keys. W. Kwon et al., "Efficient memory management for
large language model serving with PagedAttention" (2023). The query heads of one key-value head (J. Ainslie et al.,
"GQA", 2023) stand in the rows of one tile, which feeds the tensor cores in decode too. T. Dao et al., "Flash-Decoding"
(2023): few sequences are split along their keys, and a second kernel joins the parts.

Invariant: a program owns BLOCK_M rows, which are BLOCK_Q tokens of one request times the query heads of one key-value
head; it walks keys in tiles that start at multiples of BLOCK_N. A decode launch depends on the number of requests and
the longest sequence that may be, and not on the lengths, so that it can be recorded and replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, check_features
from quire.kernels.triton import launch
from quire.kernels.triton.launch import next_power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _request_of(starts, block, num_requests, BLOCK_Q: tl.constexpr):
    """The request that owns a block of queries: the last r with starts[r] // BLOCK_Q + r <= block.

    Each request so gets one block more than it may need, and no host has to count them.
    """
    low, high = 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _queries(starts, num_requests, BLOCK_Q: tl.constexpr, DECODE: tl.constexpr):
    """This program's request, the request's first row and number of queries, and its first query for this program."""
    block = tl.program_id(0)
    if DECODE:
        return block, block, block * 0, block * 0 + 1
    else:
        request = _request_of(starts, block, num_requests, BLOCK_Q)
        start = tl.load(starts + request)
        first_query = (block - start // BLOCK_Q - request) * BLOCK_Q
        return request, start, first_query, tl.load(starts + request + 1) - start


@triton.jit
def _first_key(position, window, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first key that a query at a position sees; a window that is CHUNKED begins at multiples of its size."""
    if CHUNKED:
        return tl.maximum(position, 0) // window * window
    elif HAS_WINDOW:
        return tl.maximum(position - window + 1, 0)
    else:
        return position * 0


@triton.jit
def _parts(
    length,
    window,
    num_splits,
    split_tokens,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Where the parts of a sequence with one query begin, and the keys in each.

    EVEN parts share what is seen among the programs there are; others stand at multiples of their size. It is the
    sequence's own length that decides, so a launch that was recorded serves any lengths.
    """
    first = 0
    if EVEN and HAS_WINDOW:
        first = _first_key(length - 1, window, HAS_WINDOW, CHUNKED) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(length - first, num_splits), BLOCK_N) * BLOCK_N
    return first, tl.maximum(share, split_tokens)


@triton.jit
def _seen(
    history, first_query, num_queries, window,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """The keys that some query of a tile sees, from the beginning of one of their tiles."""
    end = history + tl.minimum(first_query + BLOCK_Q, num_queries)
    return _first_key(history + first_query, window, HAS_WINDOW, CHUNKED) // BLOCK_N * BLOCK_N, end


@triton.jit
def _scores(
    query, key, distance, reach, slope, scale, soft_cap,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Scores in powers of two, -inf where a key is not seen: in the future, or farther than the query's reach [M].

    query [M, D], key [D, N], distance [M, N].
    """
    score = tl.dot(query, key, input_precision="ieee") * scale
    if HAS_CAP:
        score = soft_cap * (2.0 / (1.0 + tl.exp(-2.0 * score / soft_cap)) - 1.0)
    if HAS_SLOPES:
        score -= slope[:, None] * distance.to(tl.float32)
    seen = distance >= 0
    if HAS_WINDOW:
        seen &= distance <= reach[:, None]
    return tl.where(seen, score * LOG2_E, float("-inf"))


@triton.jit
def joined(largest, total, mixed, part_largest, part_total, part_mixed):
    """Add a part to the sum of those before it; the one place where that is done, so that it always rounds alike."""
    new_largest = tl.maximum(largest, part_largest)
    # What has seen nothing yet has a largest score of -inf; measured from 0 its weights are 0 and not NaN.
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    decay, share = tl.exp2(largest - reference), tl.exp2(part_largest - reference)
    return (
        new_largest,
        total * decay + part_total * share,
        mixed * decay[:, None] + part_mixed * share[:, None],
    )


@triton.jit
def _result(largest, total, mixed, sinks, head, used, HAS_SINKS: tl.constexpr):
    """What rows have seen divided by its mass, to which a head's sink, a key without a value, is added last."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2_E
        largest, total, mixed = joined(largest, total, mixed, sink, 1.0, tl.zeros_like(mixed))
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["num_requests", "num_splits"])
def _attend(
    out, parts, q, k_cache, v_cache, starts, lengths, tables, slopes, sinks,
    num_requests, scale, soft_cap, window, split_tokens, num_splits,
    q_token, q_head, table_width, kc_block, kc_head, kc_dim, kc_slot, vc_block, vc_head, vc_slot, vc_dim,
    HEAD: tl.constexpr, HEAD_TILE: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, DECODE: tl.constexpr,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, JOIN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(1), tl.program_id(2)
    request, start, first_query, num_queries = _queries(starts, num_requests, BLOCK_Q, DECODE)
    if first_query >= num_queries:
        return
    length = tl.load(lengths + request)
    history = length - num_queries
    if SPLIT:
        first_key, part_tokens = _parts(
            length, window, num_splits, split_tokens, BLOCK_N, EVEN, HAS_WINDOW, CHUNKED
        )
        first_key += split * part_tokens
        if first_key >= length:
            return

    row = tl.arange(0, BLOCK_M)
    query_index = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_used = (row < BLOCK_Q * GROUP) & (query_index < num_queries)
    position = history + query_index
    dim = tl.arange(0, HEAD_TILE)
    dim_used = dim < HEAD
    used = row_used[:, None] & dim_used[None, :]
    token = (start + query_index).to(tl.int64)
    place = token[:, None] * q_token + head[:, None] * q_head + dim[None, :]
    query = tl.load(q + place, mask=used, other=0.0)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=row_used, other=0.0).to(tl.float32)
    reach = position - _first_key(position, window, HAS_WINDOW, CHUNKED)

    begin, end = _seen(history, first_query, num_queries, window, BLOCK_Q, BLOCK_N, HAS_WINDOW, CHUNKED)
    if SPLIT:
        begin = tl.maximum(begin, first_key)
        end = tl.minimum(end, first_key + part_tokens)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, HEAD_TILE], tl.float32)
    if JOIN:
        all_largest, all_total, all_mixed = largest, total, mixed
    column = tl.arange(0, BLOCK_N)
    table = tables + request.to(tl.int64) * table_width
    for tile in range(begin, end, BLOCK_N):
        if JOIN:  # noqa: SIM102  (decided when the kernel is compiled)
            if tile % split_tokens == 0:
                all_largest, all_total, all_mixed = joined(
                    all_largest, all_total, all_mixed, largest, total, mixed
                )
                largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                mixed = tl.zeros([BLOCK_M, HEAD_TILE], tl.float32)
        key_position = tile + column
        known = key_position < end
        block = tl.load(table + key_position // PAGE, mask=known, other=0).to(tl.int64)
        slot = key_position % PAGE
        key_place = (
            block[None, :] * kc_block + kv_head * kc_head + dim[:, None] * kc_dim + slot[None, :] * kc_slot
        )
        key = tl.load(k_cache + key_place, mask=known[None, :] & dim_used[:, None], other=0.0).to(query.dtype)
        value_place = (
            block[:, None] * vc_block + kv_head * vc_head + slot[:, None] * vc_slot + dim[None, :] * vc_dim
        )
        value = tl.load(v_cache + value_place, mask=known[:, None] & dim_used[None, :], other=0.0).to(
            query.dtype
        )
        distance = tl.where(known[None, :], position[:, None] - key_position[None, :], -1)
        score = _scores(query, key, distance, reach, slope, scale, soft_cap, HAS_CAP, HAS_SLOPES, HAS_WINDOW)
        new_largest = tl.maximum(largest, tl.max(score, 1))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score - reference[:, None])
        decay = tl.exp2(largest - reference)
        total = total * decay + tl.sum(weight, 1)
        mixed = mixed * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        largest = new_largest

    out_row = token * (tl.num_programs(1) * GROUP) + head
    if SPLIT:
        # parts [T, Hq, splits, HEAD + 2]: the sum, its mass and its largest score.
        part = parts + (out_row * num_splits + split) * (HEAD + 2)
        tl.store(part[:, None] + dim[None, :], mixed, mask=used)
        tl.store(part + HEAD, total, mask=row_used)
        tl.store(part + HEAD + 1, largest, mask=row_used)
    else:
        if JOIN:
            largest, total, mixed = joined(all_largest, all_total, all_mixed, largest, total, mixed)
        result = _result(largest, total, mixed, sinks, head, row_used, HAS_SINKS)
        tl.store(out + out_row[:, None] * HEAD + dim[None, :], result.to(out.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["num_splits"])
def _join_parts(
    out, parts, lengths, sinks, window, split_tokens, num_splits,
    HEAD: tl.constexpr, HEAD_TILE: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Join the parts of a request's only token, for one head, in the order of their keys."""
    request, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + request)
    first_key, part_tokens = _parts(
        length, window, num_splits, split_tokens, BLOCK_N, EVEN, HAS_WINDOW, CHUNKED
    )
    dim = tl.arange(0, HEAD_TILE)[None, :]
    inside = dim < HEAD
    row = request.to(tl.int64) * tl.num_programs(1) + head
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, HEAD_TILE], tl.float32)
    one = tl.arange(0, 1)
    for split in range(tl.cdiv(length - first_key, part_tokens)):
        part = parts + (row * num_splits + split) * (HEAD + 2)
        part_mixed = tl.load(part + dim, mask=inside, other=0.0)
        part_total, part_largest = tl.load(part + HEAD + one), tl.load(part + HEAD + 1 + one)
        largest, total, mixed = joined(largest, total, mixed, part_largest, part_total, part_mixed)
    result = _result(largest, total, mixed, sinks, head + one, one == 0, HAS_SINKS)
    tl.store(out + row * HEAD + dim, result.to(out.dtype.element_ty), mask=inside)


class Shape(NamedTuple):
    """How a batch is cut into programs."""

    decode: bool
    """One query per request, and a program for each."""
    block_m: int
    block_n: int
    split_tokens: int = 0
    """Keys per part, a multiple of `block_n`; 0: not in parts."""
    even_splits: int = 0
    """In how many even parts, of `split_tokens` at least, what a sequence sees is cut; 0: they are all of that size."""
    num_warps: int = 4
    num_stages: int = 2


MAX_SPLITS = 64
"""Parts of a sequence at most; bounds the workspace."""
MIN_SPLIT_TILES = 4
INVARIANT_SPLIT_TOKENS = 1024


def decode_shape(group: int, num_programs: int, num_processors: int) -> Shape:
    """With too few programs (requests times key-value heads) for two waves, keys are split until there are enough."""
    block_n = 32
    splits = min(-(-2 * num_processors // num_programs), MAX_SPLITS)
    split_tokens = MIN_SPLIT_TILES * block_n if splits > 1 else 0
    return Shape(
        True, max(16, next_power_of_2(group)), block_n, split_tokens, splits, num_warps=4, num_stages=3
    )


def prefill_shape(group: int, head_size: int, max_query_len: int) -> Shape:
    """Whole prompts take the large tile that keeps the tensor cores busy, short chunks a smaller one."""
    large = max_query_len * group >= 128 and head_size <= 128
    block_m = max(128 if large else 64, next_power_of_2(group))
    return Shape(False, block_m, 64 if head_size <= 128 else 32, num_warps=8 if large else 4, num_stages=3)


def invariant_shape(group: int, *, decode: bool) -> Shape:
    """The same tiles and parts for every batch: a row's sums do not depend on who else is in it, or on how a prompt
    is cut into chunks. A decode step makes the parts side by side, a prompt one after the other."""
    return Shape(
        decode, max(64, next_power_of_2(group)), 32, INVARIANT_SPLIT_TOKENS, num_warps=4, num_stages=2
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
) -> Tensor:
    """See `ops.paged_attention`: the fastest shape for the batch."""
    num_requests, kv_heads = len(metadata.seq_lens), k_cache.shape[1]
    group = q.shape[1] // kv_heads
    if is_decode(q, metadata):
        programs = max(num_requests * kv_heads, 1)
        shape = decode_shape(group, programs, launch.num_processors(q.device))
    else:
        shape = prefill_shape(group, q.shape[2], metadata.max_query_len)
    return attend(
        q,
        k_cache,
        v_cache,
        metadata,
        scale,
        shape,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
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
) -> Tensor:
    """`paged_attention` whose rows have the same bits in every batch and chunk."""
    shape = invariant_shape(q.shape[1] // k_cache.shape[1], decode=is_decode(q, metadata))
    return attend(
        q,
        k_cache,
        v_cache,
        metadata,
        scale,
        shape,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )


def is_decode(q: Tensor, metadata: AttentionMetadata) -> bool:
    """Whether row r is the only one of request r, for all of them."""
    return metadata.max_query_len == 1 and len(metadata.seq_lens) == len(q)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    shape: Shape,
    *,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Launch in a given shape."""
    check_features(q, sliding_window, attention_chunk, soft_cap, alibi_slopes, sinks)
    (tokens, heads, head_size), (_, kv_heads, _, page) = q.shape, k_cache.shape
    num_requests, group = len(metadata.seq_lens), heads // kv_heads
    block_q = shape.block_m // group
    # Rows of no request are not written, but where there is one request to a row.
    make = torch.empty if shape.decode else torch.zeros
    out = make(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0 or num_requests == 0:
        return out
    in_parts = shape.decode and shape.split_tokens > 0
    num_splits = -(-metadata.max_seq_len // shape.split_tokens) if in_parts else 1
    if in_parts and shape.even_splits:
        num_splits = min(num_splits, shape.even_splits)
    parts_shape = (tokens, heads, num_splits, head_size + 2) if in_parts else (0,)
    parts = torch.empty(parts_shape, dtype=torch.float32, device=q.device)
    blocks = num_requests if shape.decode else tokens // block_q + num_requests
    head_tile = max(16, next_power_of_2(head_size))
    starts, lengths = metadata.query_start_loc, metadata.seq_lens
    window = attention_chunk or sliding_window or 0
    _attend[(blocks, kv_heads, num_splits)](
        out, parts, q, k_cache, v_cache, starts, lengths, metadata.block_tables, alibi_slopes, sinks,
        num_requests, scale, soft_cap or 0.0, window, shape.split_tokens, num_splits,
        q.stride(0), q.stride(1), metadata.block_tables.stride(0), *k_cache.stride(), *v_cache.stride(),
        HEAD=head_size, HEAD_TILE=head_tile, GROUP=group, PAGE=page,
        BLOCK_M=shape.block_m, BLOCK_Q=block_q, BLOCK_N=shape.block_n, DECODE=shape.decode,
        SPLIT=in_parts, EVEN=shape.even_splits > 0, JOIN=shape.split_tokens > 0 and not shape.decode,
        HAS_CAP=soft_cap is not None, HAS_SLOPES=alibi_slopes is not None, HAS_SINKS=sinks is not None,
        HAS_WINDOW=window > 0, CHUNKED=attention_chunk is not None,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if in_parts:
        _join_parts[(num_requests, heads)](
            out, parts, lengths, sinks, window, shape.split_tokens, num_splits,
            HEAD=head_size, HEAD_TILE=head_tile, BLOCK_N=shape.block_n, EVEN=shape.even_splits > 0,
            HAS_SINKS=sinks is not None, HAS_WINDOW=window > 0, CHUNKED=attention_chunk is not None,
        )  # fmt: skip
    return out
