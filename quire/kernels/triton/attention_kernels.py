# SPDX-License-Identifier: Apache-2.0
"""Kernels of paged attention: tiles of keys for tiles of queries, and the joining of parts.

Invariant: a program owns BLOCK_M rows, which are BLOCK_Q tokens of one request times the query heads of one key-value
head; it processes keys in tiles that start at multiples of BLOCK_N, part by part. The start of a part depends on the
request's own length, never on the batch or on the number of programs. Multiply-adds are written as explicit `fma`: a
compiler would fuse differently with and without masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-(1 << 30))
"""Distance of a key that does not exist, farther ahead than any query sees."""
FEW_PARTS = tl.constexpr(4)
"""Number of parts of a short sequence, so that it does not depend on one program alone."""


@triton.jit
def _request_of(starts, block, num_requests, BLOCK_Q: tl.constexpr):
    """Return the request that owns a block of queries: the last r with starts[r] // BLOCK_Q + r <= block.

    Each request gets one block more than it may need, so the host does not have to count them.
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
def _queries(starts, num_requests, fewest_queries, BLOCK_Q: tl.constexpr, ONE_QUERY: tl.constexpr):
    """Return this program's request, the request's first row and number of queries, and the program's first query.

    A request of the other launch has no queries here. A prompt's last queries, which see the most keys, come first.
    """
    if ONE_QUERY:
        request = tl.program_id(1)
        start = tl.load(starts + request)
        num_queries = tl.load(starts + request + 1) - start
        return request, start, num_queries * 0, tl.where(num_queries == 1, 1, 0)
    else:
        block = tl.num_programs(1) - 1 - tl.program_id(1)
        request = _request_of(starts, block, num_requests, BLOCK_Q)
        start = tl.load(starts + request)
        num_queries = tl.load(starts + request + 1) - start
        first_query = (block - start // BLOCK_Q - request) * BLOCK_Q
        return request, start, first_query, tl.where(num_queries < fewest_queries, 0, num_queries)


@triton.jit
def _first_key(position, window, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the first key visible to a query at a position; a CHUNKED window begins at multiples of its size."""
    if CHUNKED:
        return tl.maximum(position, 0) // window * window
    elif HAS_WINDOW:
        return tl.maximum(position - window + 1, 0)
    else:
        return position * 0


@triton.jit
def _parts(
    length, window, most_parts, part_tokens,
    BLOCK_N: tl.constexpr, EVEN: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Return the start of the parts of a sequence with one query, the keys in each, and the number of parts.

    EVEN parts divide the visible keys equally: FEW_PARTS for a short sequence, then as many as there are `part_tokens`,
    at most `most_parts`. Others start at multiples of `part_tokens`. Only the sequence's own length matters, so a
    captured launch serves any lengths.
    """
    first = 0
    if EVEN:
        if HAS_WINDOW:
            first = _first_key(length - 1, window, HAS_WINDOW, CHUNKED) // BLOCK_N * BLOCK_N
        few = tl.cdiv(tl.cdiv(length - first, FEW_PARTS), BLOCK_N) * BLOCK_N
        most = tl.cdiv(tl.cdiv(length - first, most_parts), BLOCK_N) * BLOCK_N
        part_tokens = tl.maximum(most, tl.minimum(few, part_tokens))
    return first, part_tokens, tl.cdiv(length - first, part_tokens)


@triton.jit
def _plain(
    history, first_query, end, part_begin, part_end, window,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Return the range in a part within which all queries of a tile see all keys of each tile."""
    begin = _first_key(end - 1, window, HAS_WINDOW, CHUNKED)
    begin = tl.minimum(tl.maximum(tl.cdiv(begin, BLOCK_N) * BLOCK_N, part_begin), part_end)
    plain_end = (history + first_query + 1) // BLOCK_N * BLOCK_N
    return begin, tl.maximum(tl.minimum(plain_end, part_end), begin)


@triton.jit
def _seen(
    history, start, first_query, num_queries, window, last_seen,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    HAS_LAST: tl.constexpr,
):  # fmt: skip
    """Return the keys visible to any query of a tile, starting at a tile boundary."""
    end_query = tl.minimum(first_query + BLOCK_Q, num_queries)
    end = history + end_query
    if HAS_LAST:
        end = tl.load(last_seen + start + end_query - 1) + 1
    return _first_key(history + first_query, window, HAS_WINDOW, CHUNKED) // BLOCK_N * BLOCK_N, end


@triton.jit
def _ahead(last_seen, token, used, position, HAS_LAST: tl.constexpr):
    """Return the number of positions behind its own that each query sees."""
    if HAS_LAST:
        return tl.load(last_seen + token, mask=used, other=0) - position
    else:
        return position * 0


@triton.jit
def load_where(pointer, mask, MASKED: tl.constexpr):
    """Load with the mask if MASKED, with 0 elsewhere."""
    if MASKED:
        return tl.load(pointer, mask=mask, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def _scores(
    query, key, distance, ahead, reach, slope, bias_row, center, unit, scale, soft_cap,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_LAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return scores, -inf for invisible keys: more than `ahead` [M] in the future, or farther than the query's reach
    [M].

    query [M, D], key [D, N], distance [M, N]. Times the unit they are exponents of 2; with slopes or biases they are
    not scaled.
    """
    score = tl.dot(query, key, input_precision="ieee")
    if HAS_CAP:
        score = 2.0 / (1.0 + tl.exp(-2.0 * (score * scale) / soft_cap)) - 1.0
    if HAS_SLOPES:
        away = tl.abs(distance) if HAS_LAST else distance
        score = tl.fma(-(slope * LOG2_E)[:, None], away.to(tl.float32), score * unit)
    if HAS_BIAS:
        # Rows of no query, and keys that are hidden, may be out of the table.
        known = (distance <= center) & (distance >= -center)
        bias = tl.load(bias_row[:, None] + center - distance, mask=known, other=0.0)
        score = tl.fma(bias, LOG2_E, score if HAS_SLOPES else score * unit)
    if MASKED:
        seen = distance >= (-ahead[:, None] if HAS_LAST else 0)
        if HAS_WINDOW:
            seen &= distance <= reach[:, None]
        score = tl.where(seen, score, float("-inf"))
    return score


@triton.jit
def _add_tile(
    largest, total, mixed, tile, end, query, position, ahead, reach, slope, bias_row, center, scale, soft_cap,
    table, k_head, v_head, kc_block, kc_dim, kc_slot, vc_block, vc_slot, vc_dim,
    HEAD: tl.constexpr, HEAD_TILE: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_LAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one more tile of keys by online softmax; not MASKED if all of them exist and are visible to every query."""
    PADDED: tl.constexpr = MASKED or HEAD != HEAD_TILE
    key_position = tile + tl.arange(0, BLOCK_N)
    known, dim = key_position < end, tl.arange(0, HEAD_TILE)
    block = load_where(table + key_position // PAGE, known, MASKED).to(tl.int64)
    slot, inside = key_position % PAGE, dim < HEAD
    key_place = block[None, :] * kc_block + dim[:, None] * kc_dim + slot[None, :] * kc_slot
    key = load_where(k_head + key_place, known[None, :] & inside[:, None], PADDED).to(query.dtype)
    value_place = block[:, None] * vc_block + slot[:, None] * vc_slot + dim[None, :] * vc_dim
    value = load_where(v_head + value_place, known[:, None] & inside[None, :], PADDED).to(query.dtype)
    distance = position[:, None] - key_position[None, :]
    if MASKED:
        distance = tl.where(known[None, :], distance, NEVER if HAS_LAST else -1)
    unit = (soft_cap if HAS_CAP else scale) * LOG2_E
    score = _scores(
        query, key, distance, ahead, reach, slope, bias_row, center, unit, scale, soft_cap,
        HAS_CAP, HAS_SLOPES, HAS_BIAS, HAS_WINDOW, HAS_LAST, MASKED,
    )  # fmt: skip
    if HAS_SLOPES or HAS_BIAS:
        unit = 1.0
    new_largest = tl.maximum(largest, tl.max(score, 1) * unit)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weight = tl.exp2(tl.fma(score, tl.full(score.shape, unit, tl.float32), -reference[:, None]))
    decay = tl.exp2(largest - reference)
    mixed = tl.dot(weight.to(value.dtype), value, mixed * decay[:, None], input_precision="ieee")
    return new_largest, tl.fma(total, decay, tl.sum(weight, 1)), mixed


@triton.jit
def joined(largest, total, mixed, part_largest, part_total, part_mixed):
    """Add a part to the sum of those before it; the only place that does so, so that it always rounds alike."""
    new_largest = tl.maximum(largest, part_largest)
    # Rows without any visible key have a largest score of -inf; measured from 0 their weights are 0 and not NaN.
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    decay, share = tl.exp2(largest - reference), tl.exp2(part_largest - reference)
    return (
        new_largest,
        tl.fma(total, decay, part_total * share),
        tl.fma(mixed, decay[:, None], part_mixed * share[:, None]),
    )


@triton.jit
def joined_in_order(largest, total, mixed, parts, known, size, dim, inside, TILE: tl.constexpr):
    """Apply `joined` to TILE parts in order, loaded together: parts [TILE] points at their sums, followed after `size`
    numbers by the mass and the largest score.
    """
    sums = tl.load(parts[:, None] + dim, mask=known[:, None] & inside, other=0.0)
    masses = tl.load(parts + size, mask=known, other=0.0)
    scores = tl.load(parts + size + 1, mask=known, other=float("-inf"))
    index = tl.arange(0, TILE)
    for part in tl.static_range(TILE):
        # A sum that is zero elsewhere extracts one element exactly.
        is_this = index == part
        largest, total, mixed = joined(
            largest, total, mixed,
            tl.sum(tl.where(is_this, scores, 0.0), 0), tl.sum(tl.where(is_this, masses, 0.0), 0),
            tl.sum(tl.where(is_this[:, None], sums, 0.0), 0)[None, :],
        )  # fmt: skip
    return largest, total, mixed


@triton.jit
def _result(largest, total, mixed, sinks, head, used, HAS_SINKS: tl.constexpr):
    """Return rows divided by their mass, to which the head's sink, a key without a value, is added last."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2_E
        largest, total, mixed = joined(largest, total, mixed, sink, 1.0, tl.zeros_like(mixed))
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["num_requests", "fewest_queries", "most_parts", "parts_width"])
def attend(
    out, parts, q, k_cache, v_cache, starts, lengths, tables, slopes, sinks, last_seen, biases, center,
    num_requests, fewest_queries, scale, soft_cap, window, part_tokens, most_parts, parts_width,
    q_token, q_head, table_width, kc_block, kc_head, kc_dim, kc_slot, vc_block, vc_head, vc_slot, vc_dim,
    HEAD: tl.constexpr, HEAD_TILE: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, ONE_QUERY: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """Attend a tile of queries. With ONE_QUERY, PARTS are written to `parts`; with more they are joined at once.

    Programs: (key-value head, request or block of queries, parts).
    """
    kv_head = tl.program_id(0)
    request, start, first_query, num_queries = _queries(
        starts, num_requests, fewest_queries, BLOCK_Q, ONE_QUERY
    )
    if first_query >= num_queries:
        return
    length = tl.load(lengths + request)
    history = length - num_queries
    SPLIT: tl.constexpr = PARTS and ONE_QUERY

    row = tl.arange(0, BLOCK_M)
    query_index = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_used = (row < BLOCK_Q * GROUP) & (query_index < num_queries)
    position = history + query_index
    dim = tl.arange(0, HEAD_TILE)
    used = row_used[:, None] & (dim < HEAD)[None, :]
    token = (start + query_index).to(tl.int64)
    place = token[:, None] * q_token + head[:, None] * q_head + dim[None, :]
    query = tl.load(q + place, mask=used, other=0.0)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=row_used, other=0.0).to(tl.float32)
    bias_row = biases + tl.where(row_used, head, 0) * (2 * center + 1)
    reach = position - _first_key(position, window, HAS_WINDOW, CHUNKED)
    ahead = _ahead(last_seen, token, row_used, position, HAS_LAST)
    table = tables + request.to(tl.int64) * table_width
    k_head, v_head = k_cache + kv_head * kc_head, v_cache + kv_head * vc_head

    begin, end = _seen(
        history, start, first_query, num_queries, window, last_seen,
        BLOCK_Q, BLOCK_N, HAS_WINDOW, CHUNKED, HAS_LAST,
    )  # fmt: skip
    first, first_part, num_parts, step = begin, 0, 1, 1
    if SPLIT:
        first, part_tokens, num_parts = _parts(
            length, window, most_parts, part_tokens, BLOCK_N, EVEN, HAS_WINDOW, CHUNKED
        )
        first_part, step = tl.program_id(2), tl.num_programs(2)
    elif PARTS:
        first, first_part, num_parts = 0, begin // part_tokens, tl.cdiv(end, part_tokens)
    else:
        part_tokens = end - begin

    all_largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    all_total = tl.zeros([BLOCK_M], tl.float32)
    all_mixed = tl.zeros([BLOCK_M, HEAD_TILE], tl.float32)
    for part in range(first_part, num_parts, step):
        part_begin = tl.maximum(begin, first + part * part_tokens)
        part_end = tl.minimum(end, first + (part + 1) * part_tokens)
        plain_begin, plain_end = _plain(
            history, first_query, end, part_begin, part_end, window, BLOCK_N, HAS_WINDOW, CHUNKED
        )
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, HEAD_TILE], tl.float32)
        for stage in tl.static_range(0 if HAS_WINDOW else 1, 3):
            stage_begin, stage_end = part_begin, plain_begin
            if stage == 1:
                stage_begin, stage_end = plain_begin, plain_end
            elif stage == 2:
                stage_begin, stage_end = plain_end, part_end
            for tile in range(stage_begin, stage_end, BLOCK_N):
                largest, total, mixed = _add_tile(
                    largest, total, mixed, tile, end, query, position, ahead, reach, slope, bias_row,
                    center, scale, soft_cap, table, k_head, v_head,
                    kc_block, kc_dim, kc_slot, vc_block, vc_slot, vc_dim,
                    HEAD, HEAD_TILE, PAGE, BLOCK_N, HAS_CAP, HAS_SLOPES, HAS_BIAS, HAS_WINDOW, HAS_LAST, stage != 1,
                )  # fmt: skip
        if SPLIT:
            # parts [R, Hq, parts_width, HEAD + 2]: the sum, its mass and its largest score.
            row_of_parts = request.to(tl.int64) * (tl.num_programs(0) * GROUP) + head
            target = parts + (row_of_parts * parts_width + part) * (HEAD + 2)
            tl.store(target[:, None] + dim[None, :], mixed, mask=used)
            tl.store(target + HEAD, total, mask=row_used)
            tl.store(target + HEAD + 1, largest, mask=row_used)
        else:
            all_largest, all_total, all_mixed = joined(
                all_largest, all_total, all_mixed, largest, total, mixed
            )

    if not SPLIT:
        result = _result(all_largest, all_total, all_mixed, sinks, head, row_used, HAS_SINKS)
        out_row = token * (tl.num_programs(0) * GROUP) + head
        tl.store(out + out_row[:, None] * HEAD + dim[None, :], result.to(out.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["most_parts", "parts_width"])
def join_parts(
    out, parts, starts, lengths, sinks, window, part_tokens, most_parts, parts_width,
    HEAD: tl.constexpr, HEAD_TILE: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Join the parts of a request with one query, for one head: TILE at a time, in key order.

    If they are not EVEN, the bits equal those of parts that one program joins as it computes them.
    """
    head, request = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts + request)
    if tl.load(starts + request + 1) - token != 1:
        return
    length = tl.load(lengths + request)
    _, _, num_parts = _parts(length, window, most_parts, part_tokens, BLOCK_N, EVEN, HAS_WINDOW, CHUNKED)
    dim = tl.arange(0, HEAD_TILE)[None, :]
    inside = dim < HEAD
    row = request.to(tl.int64) * tl.num_programs(0) + head
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, HEAD_TILE], tl.float32)
    for first_part in range(0, num_parts, TILE):
        part = first_part + tl.arange(0, TILE)
        known = part < num_parts
        source = parts + (row * parts_width + part) * (HEAD + 2)
        if EVEN:
            part_mixed = tl.load(source[:, None] + dim, mask=known[:, None] & inside, other=0.0)
            part_total = tl.load(source + HEAD, mask=known, other=0.0)
            part_largest = tl.load(source + HEAD + 1, mask=known, other=float("-inf"))
            tile_largest = tl.max(part_largest, 0)
            weight = tl.exp2(part_largest - tl.where(tile_largest == float("-inf"), 0.0, tile_largest))
            largest, total, mixed = joined(
                largest, total, mixed,
                tile_largest, tl.sum(part_total * weight, 0), tl.sum(part_mixed * weight[:, None], 0)[None, :],
            )  # fmt: skip
        else:
            largest, total, mixed = joined_in_order(
                largest, total, mixed, source, known, HEAD, dim, inside, TILE
            )
    one = tl.arange(0, 1)
    result = _result(largest, total, mixed, sinks, head + one, one == 0, HAS_SINKS)
    place = out + (token.to(tl.int64) * tl.num_programs(0) + head) * HEAD + dim
    tl.store(place, result.to(out.dtype.element_ty), mask=inside)
