// SPDX-License-Identifier: Apache-2.0
// One tile of keys and values for all rows of an item.
//
// Where the cache's blocks hold whole pieces of 16, products read them where they lie; else, and for so many rows that it
// pays, through a float32 copy of the tile. Both ways give the same bits. A scale of an int8 cache belongs to a position: it
// multiplies the scores and the weights of that position, not its elements.

#pragma once

#include "attention_product.h"
#include "attention_read.h"
#include "attention_softmax.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kInPlaceRows = 24;  // up to which converting a tile for every block of rows is cheaper than a copy

// The state of all rows of an item over some of its keys.
struct Part {
    Float32* out;  // [rows][row_floats]
    Running* running;

    void clear(int64_t rows, int64_t n) const {
        __builtin_memset(out, 0, static_cast<size_t>(rows * row_floats(n)) * sizeof(Float32));
        for (int64_t r = 0; r < rows; ++r) running[r] = {-__builtin_inff(), 0.0f};
    }
    void add(const Part& later, int64_t rows, int64_t n) const {
        const int64_t stride = row_floats(n);
        for (int64_t r = 0; r < rows; ++r)
            merge_row(out + r * stride, running[r], later.out + r * stride, later.running[r], n);
    }
};

// Even, so that pointers may follow.
inline int64_t part_floats(int64_t rows, int64_t n) { return rows * (row_floats(n) + 2); }

// One thread's memory for any item of a call.
struct Scratch {
    Part split, whole;
    Float32 *queries;  // blocks of rows, [head size][rows of the block]; see `load_queries`
    Float32 *scores;   // [rows][kKeyTile]
    Float32 *tile;     // [head size][kTileStride] of keys, [kKeyTile][row_floats + kPadding] of values
    Float32 *scales;   // [kKeyTile]
    float* factors;    // [rows]
};

template <class C>
inline bool in_place(const Call& call, const Item& item) {
    const bool fits = call.shape.block_size % kPiece == 0 && call.shape.head_size % kPiece == 0;
    return fits && (std::is_same_v<C, Float32> || item.rows(call) <= kInPlaceRows);
}

// Eight dimensions of R queries, times the scale: [R][8] at `d` -> [8][R].
template <int R, class T>
inline void turn_queries(Float32* out, const T* const (&q)[R], int64_t d, float scale) {
    if constexpr (R >= kLanes) {
        // Of more than eight rows the last eight as well, some of them once more.
        for (int64_t first = 0;; first = R - kLanes) {
            Vec square[kLanes];
            for (int64_t i = 0; i < kLanes; ++i) square[i] = load(q[first + i] + d, All{}) * scale;
            transpose(square);
            for (int64_t i = 0; i < kLanes; ++i) store(out + i * R + first, square[i], All{});
            if (first + kLanes == R) break;
        }
    } else {
        Float32 scaled[R][kLanes];
        for (int64_t r = 0; r < R; ++r) store(scaled[r], load(q[r] + d, All{}) * scale, All{});
        for (int64_t i = 0; i < kLanes; ++i)
            for (int64_t r = 0; r < R; ++r) out[i * R + r] = scaled[r][i];
    }
}

// Queries of a row block lie side by side for each dimension, multiplied by the scale of scores.
template <class T>
void load_queries(Float32* rows, const Call& call, const Item& item) {
    const int64_t n = call.shape.head_size;
    for_each_row_block(item.rows(call), [&](auto count, int64_t first) {
        constexpr int R = decltype(count)::value;
        const T* q[R];
        for (int64_t r = 0; r < R; ++r) {
            const int64_t token = item.token + (first + r) / call.group, head = (first + r) % call.group;
            q[r] = static_cast<const T*>(call.q) + token * call.token_stride + (item.head * call.group + head) * call.head_stride;
        }
        for (int64_t d = 0; d < n; d += kLanes) turn_queries(rows + first * n + d * R, q, d, call.scale);
    });
}

template <class T>
void store_row(const Call& call, int64_t token, int64_t head, const Float32* row, float factor) {
    const int64_t n = call.value_size;
    T* out = static_cast<T*>(call.out) + (token * call.shape.heads * call.group + head) * n;
    // Adding 0 makes one zero of both: the sign of a sum of zeros would reveal the skipped tiles.
    for (int64_t d = 0; d < n; d += kLanes) store(out + d, load(row + d, All{}) * factor + 0.0f, All{});
}

// scores = queries * keys, for the pieces that a block of rows sees.
template <class B>
inline void score(const Call& call, const Item& item, const Scratch& scratch, const Seen& tile, const Pieces<B>& keys,
                  const Pieces<B>& values) {
    const int64_t n = call.shape.head_size;
    for_each_row_block(item.rows(call), [&](auto count, int64_t row) {
        constexpr int R = decltype(count)::value;
        const Seen seen = tile.by_rows(call, item, row, R);
        const Float32* q = scratch.queries + row * n;
        for_each_pieces<R>(seen.first_piece(), seen.end_piece(), [&](auto pieces, int64_t piece) {
            constexpr int N = decltype(pieces)::value;
            const B *b[N], *ahead[N];
            for (int i = 0; i < N; ++i) b[i] = keys.at[piece + i], ahead[i] = values.at[piece + i];
            Sums<R, N> sums;
            sums.clear();
            const auto query = [q](int r, int64_t k) { return q[k * decltype(count)::value + r].value; };
            sums.add(query, b, keys.stride, n, ahead, values.stride * kPiece / n);
            sums.finish(scratch.scores + row * kKeyTile + piece * kPiece, kKeyTile);
        });
    });
}

// out = out * factors + weights * values, in the order of positions.
template <class B>
inline void mix(const Call& call, const Item& item, const Scratch& scratch, const Seen& tile, const Pieces<B>& values,
                const Pieces<B>& next_keys) {
    const int64_t floats = row_floats(call.value_size);
    for_each_row_block(item.rows(call), [&](auto count, int64_t row) {
        constexpr int R = decltype(count)::value;
        const Seen seen = tile.by_rows(call, item, row, R);
        if (seen.is_empty()) return;
        for_each_pieces<R>(0, floats / kPiece, [&](auto pieces, int64_t piece) {
            constexpr int N = decltype(pieces)::value;
            Float32* out = scratch.split.out + row * floats + piece * kPiece;
            Sums<R, N> sums;
            sums.start(out, floats, scratch.factors + row);
            for (int64_t p = seen.first_piece(); p < seen.end_piece(); ++p) {
                // Keys before `low` have weight 0 in every row, and their values may be anything.
                const int64_t low = larger_of(seen.low, seen.start + p * kPiece), offset = low - seen.start;
                const int64_t high = smaller_of(seen.high, seen.start + (p + 1) * kPiece);
                const Float32* w = scratch.scores + row * kKeyTile + offset;
                const B *b[N], *ahead[N];
                for (int i = 0; i < N; ++i) {
                    b[i] = values.at[p] + offset % kPiece * values.stride + (piece + i) * kPiece;
                    ahead[i] = next_keys.at[p] + (piece + i) * kPiece * next_keys.stride;
                }
                const auto weight = [w](int r, int64_t k) { return w[r * kKeyTile + k].value; };
                sums.add(weight, b, values.stride, high - low, ahead, next_keys.stride);
            }
            sums.finish(out, floats);
        });
    });
}

template <class C>
inline Pieces<Float32> copied_values(const Call& call, const Item& item, const Seen& seen, Float32* tile) {
    copy_values<C>(call, item, seen, tile);
    const int64_t stride = row_floats(call.shape.head_size) + kPadding;
    Pieces<Float32> pieces{{}, stride};
    for (int64_t p = 0; p < kTilePieces; ++p) pieces.at[p] = tile + p * kPiece * stride;
    return pieces;
}

template <class C>
inline void score_tile(const Call& call, const Item& item, const Seen& seen, const Scratch& scratch) {
    if (in_place<C>(call, item))
        return score(call, item, scratch, seen, cached_keys<C>(call, item, seen), cached_values<C>(call, item, seen));
    copy_keys<C>(call, item, seen, scratch.tile);
    Pieces<Float32> pieces{{}, kTileStride};
    for (int64_t p = 0; p < kTilePieces; ++p) pieces.at[p] = scratch.tile + p * kPiece;
    score(call, item, scratch, seen, pieces, pieces);
}

template <class C>
inline void mix_tile(const Call& call, const Item& item, const Seen& seen, const Seen& next, const Scratch& scratch) {
    if (in_place<C>(call, item))
        return mix(call, item, scratch, seen, cached_values<C>(call, item, seen), cached_keys<C>(call, item, next));
    const Pieces<Float32> pieces = copied_values<C>(call, item, seen, scratch.tile);
    mix(call, item, scratch, seen, pieces, pieces);
}

inline void multiply_rows(Float32* rows, int64_t count, int64_t columns, const Float32* scales) {
    for (Float32* row = rows; row < rows + count * kKeyTile; row += kKeyTile)
        for (int64_t i = 0; i < columns; i += kLanes)
            store(row + i, load(row + i, All{}) * load(scales + i, All{}), All{});
}

template <class C>
void attend_tile(const Call& call, const Item& item, int64_t tile, const Scratch& scratch) {
    constexpr bool kScaled = kScaleElements<C> != 0;
    const Seen seen(call, item, tile), next(call, item, tile + 1);
    const int64_t columns = seen.end_piece() * kPiece;
    score_tile<C>(call, item, seen, scratch);
    if constexpr (kScaled) {
        load_key_scales(call, item, seen, scratch.scales);
        multiply_rows(scratch.scores, item.rows(call), columns, scratch.scales);
        ask_for_key_scales(call, item, next);
    }
    weigh(call, item, seen, scratch.scores, scratch.split.running, scratch.factors);
    if constexpr (kScaled) {
        load_value_scales(call, item, seen, scratch.scales);
        multiply_rows(scratch.scores, item.rows(call), columns, scratch.scales);
    }
    mix_tile<C>(call, item, seen, next, scratch);
}

}}}  // namespace quire::QUIRE_ISA
