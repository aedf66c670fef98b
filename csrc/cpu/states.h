// SPDX-License-Identifier: Apache-2.0
// States that layers keep of each request: where a step's rows start from, and where they leave a state.
//
// With quire/kernels/reference_scan.py the only reader of a table of states; RecurrentStateSpec says what stands in it.

#pragma once

#include "kernels.h"

#include <cstddef>

namespace quire { namespace QUIRE_ISA { namespace {

// Whose the rows of a step are: StateMetadata, the number of rows, and the number of blocks that the cache has. Of a request's
// `lengths` tokens those behind the first `kept` are drafts.
struct StateBatch {
    const int32_t *starts, *lengths, *kept, *tables;
    int64_t rows, requests, table_width, block_size, num_blocks;

    // Rows [first, last) of a request. One of length 0 is padding and has none.
    int64_t first(int64_t request) const { return starts[request]; }
    int64_t last(int64_t request) const { return lengths[request] ? starts[request + 1] : starts[request]; }
    // Position of a request's first row.
    int64_t start(int64_t request) const { return lengths[request] - (last(request) - first(request)); }
    const int32_t* table(int64_t request) const { return tables + request * table_width; }
};

inline bool has_place(const StateBatch& batch, int64_t request, int64_t position) {
    const int32_t block = batch.table(request)[position / batch.block_size];
    return block > 0 && block < batch.num_blocks;
}

inline bool is_bad_request(const StateBatch& batch, int64_t request) {
    const int64_t length = batch.lengths[request], end = batch.kept[request];
    if (batch.starts[request + 1] < batch.starts[request] || length < 0) return true;
    if (batch.last(request) == batch.first(request)) return false;
    const int64_t start = batch.start(request);
    if (start < 0 || end <= start || end > length || end > batch.table_width * batch.block_size) return true;
    if ((start > 0 && !has_place(batch, request, start - 1)) || !has_place(batch, request, end - 1)) return true;
    for (int64_t i = start / batch.block_size; i * batch.block_size < end; ++i) {
        const int32_t block = batch.table(request)[i];
        if (block < 0 || block >= batch.num_blocks) return true;
    }
    return false;
}

// 1 + the first request whose description points outside the step or the cache; 0 if none does.
inline int64_t find_bad_request(const StateBatch& batch) {
    if (batch.starts[0] < 0 || batch.starts[batch.requests] > batch.rows) return batch.requests + 1;
    for (int64_t request = 0; request < batch.requests; ++request)
        if (is_bad_request(batch, request)) return request + 1;
    return 0;
}

// Calls piece(first, last, source, target) for rows [first, last) of a request one after the other: from the state in block
// `source`, or from zeros if it is 0, to that in block `target`, which may be the same. The last piece may be of drafts: its
// target is 0, and the state behind it is left nowhere.
template <class Piece>
inline void for_each_piece(const StateBatch& batch, int64_t request, Piece piece) {
    const int64_t start = batch.start(request), end = batch.kept[request], offset = batch.last(request) - batch.lengths[request];
    if (batch.first(request) == batch.last(request)) return;
    const int32_t* table = batch.table(request);
    int64_t first = start, source = start > 0 ? table[(start - 1) / batch.block_size] : 0;
    for (int64_t i = start / batch.block_size; i * batch.block_size < end; ++i) {
        if (!table[i]) continue;
        const int64_t full = (i + 1) * batch.block_size, last = full < end ? full : end;
        piece(first + offset, last + offset, source, int64_t{table[i]});
        first = last;
        source = table[i];
    }
    if (first + offset < batch.last(request)) piece(first + offset, batch.last(request), source, int64_t{0});
}

// Calls body(row) for the rows that are no request's; their results are 0.
template <class Body>
inline void for_each_row_of_no_request(const StateBatch& batch, Body body) {
    for (int64_t row = 0; row < batch.first(0); ++row) body(row);
    for (int64_t request = 0; request < batch.requests; ++request)
        for (int64_t row = batch.last(request); row < batch.first(request + 1); ++row) body(row);
    for (int64_t row = batch.starts[batch.requests]; row < batch.rows; ++row) body(row);
}

inline void clear_rows_of_no_request(const StateBatch& batch, void* out, int64_t width) {
    for_each_row_of_no_request(batch, [&](int64_t row) {
        __builtin_memset(static_cast<float*>(out) + row * width, 0, static_cast<size_t>(width) * sizeof(float));
    });
}

// ln(1 + e^x), by ln(1 + u) = 2 artanh(u / (2 + u)), whose series in squares of at most 1/9 ends soon.
inline Vec softplus(Vec x) {
    const Vec u = exp(x > 0.0f ? -x : x), s = u / (u + 2.0f), square = s * s;
    constexpr float coefficients[] = {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f};
    Vec series = splat(1.0f / 15);
    for (float coefficient : coefficients) series = fma(series, square, splat(coefficient));
    return (x > 0.0f ? x : Vec{}) + 2.0f * s * series;
}

}}}  // namespace quire::QUIRE_ISA
