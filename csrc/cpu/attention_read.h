// SPDX-License-Identifier: Apache-2.0
// What attention reads of the cache: the keys and values of one tile, where they lie or as a float32 copy, and their scales.

#pragma once

#include <cstddef>

#include "attention.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kPiece = 16;  // positions, or dimensions, that are computed together
constexpr int64_t kTilePieces = kKeyTile / kPiece;
constexpr int64_t kPadding = 2 * kLanes;    // keeps the rows of a copied tile from falling into few cache sets
constexpr int64_t kTileStride = kKeyTile + kPadding;

// Rows are kept as whole pieces.
inline int64_t row_floats(int64_t head_size) { return round_up(head_size, kPiece); }

// The keys of a tile that some row of the item, or of a block of its rows, sees: positions [low, high).
struct Seen {
    int64_t start, low, high;

    Seen(const Call& call, const Item& item, int64_t tile)
        : start(tile * kKeyTile),
          low(larger_of(item.first_key(call.features), start)),
          high(smaller_of(item.end_key(call.features, item.last()), start + kKeyTile)) {}

    // Those that some of `count` rows sees.
    Seen by_rows(const Call& call, const Item& item, int64_t row, int64_t count) const {
        Seen seen = *this;
        const int64_t first = item.position + row / call.group, last = item.position + (row + count - 1) / call.group;
        seen.low = larger_of(low, call.features.first_key(first));
        seen.high = smaller_of(high, item.end_key(call.features, last));
        return seen;
    }
    bool is_empty() const { return low >= high; }

    // In pieces from `start`.
    int64_t first_piece() const { return (low - start) / kPiece; }
    int64_t end_piece() const { return ceil_div(high - start, kPiece); }
};

// Calls body(block's first element, first position in the block, first position in the sequence, count) for the blocks
// that hold the keys, or values, that are seen.
template <class C, class Body>
inline void for_each_block(const Call& call, const Item& item, const void* cache, const Seen& seen, Body body) {
    const int64_t size = call.shape.block_size;
    for (int64_t at = seen.low; at < seen.high;) {
        const int64_t offset = at % size, count = smaller_of(size - offset, seen.high - at);
        body(static_cast<const C*>(cache) + block_start<C>(call.shape, item.table(call)[at / size], item.head), offset, at,
             count);
        at += count;
    }
}

// A tile's keys, or values, by pieces of 16 positions, in the cache or in a copy; null where nothing is seen. Keys are
// [head size][stride] and values [16][stride].
template <class B>
struct Pieces {
    const B* at[kTilePieces];
    int64_t stride;
};

template <class C>
inline Pieces<C> cached_pieces(const Call& call, const Item& item, const Seen& seen, const void* cache, int64_t position_stride,
                               int64_t stride) {
    Pieces<C> pieces{{}, stride};
    const int64_t size = call.shape.block_size;
    for (int64_t p = seen.first_piece(); p < seen.end_piece(); ++p) {
        const int64_t at = seen.start + p * kPiece;
        pieces.at[p] = static_cast<const C*>(cache) + block_start<C>(call.shape, item.table(call)[at / size], item.head) +
                       at % size * position_stride;
    }
    return pieces;
}

template <class C>
inline Pieces<C> cached_keys(const Call& call, const Item& item, const Seen& seen) {
    return cached_pieces<C>(call, item, seen, call.keys, 1, call.shape.block_size);
}

template <class C>
inline Pieces<C> cached_values(const Call& call, const Item& item, const Seen& seen) {
    const int64_t stride = call.shape.head_size + kScaleElements<C>;
    return cached_pieces<C>(call, item, seen, call.values, stride, stride);
}

// Columns [begin, end) of a tile of keys, which are no keys that are seen: 0, and not whatever memory held, for numbers that
// are not normal would be multiplied a hundred times as slowly.
inline void clear_columns(Float32* tile, int64_t n, int64_t begin, int64_t end) {
    for (int64_t d = 0; begin < end && d < n; ++d)
        __builtin_memset(tile + d * kTileStride + begin, 0, static_cast<size_t>(end - begin) * sizeof(Float32));
}

template <class C>
inline void copy_keys(const Call& call, const Item& item, const Seen& seen, Float32* tile) {
    const int64_t size = call.shape.block_size, n = call.shape.head_size;
    clear_columns(tile, n, seen.first_piece() * kPiece, seen.low - seen.start);
    clear_columns(tile, n, seen.high - seen.start, seen.end_piece() * kPiece);
    for_each_block<C>(call, item, call.keys, seen, [&](const C* block, int64_t offset, int64_t at, int64_t count) {
        for_each_vector(count, [&](int64_t i, auto lanes) {
            Float32* column = tile + (at - seen.start) + i;
            const C* from = block + offset + i;
            for (int64_t d = 0; d < n; ++d) store(column + d * kTileStride, load(from + d * size, lanes), lanes);
        });
    });
}

template <class C>
inline void copy_values(const Call& call, const Item& item, const Seen& seen, Float32* tile) {
    const int64_t n = call.shape.head_size, stride = row_floats(n) + kPadding;
    for_each_block<C>(call, item, call.values, seen, [&](const C* block, int64_t offset, int64_t at, int64_t count) {
        for (int64_t key = 0; key < count; ++key) {
            const C* value = block + (offset + key) * (n + kScaleElements<C>);
            Float32* row = tile + (at - seen.start + key) * stride;
            for (int64_t d = 0; d < n; d += kLanes) store(row + d, load(value + d, All{}), All{});
        }
    });
}

// The scales of an int8 cache, by position in the tile.
inline void load_key_scales(const Call& call, const Item& item, const Seen& seen, Float32* scales) {
    const int64_t vectors = call.shape.head_size * call.shape.block_size;
    for_each_block<Int8>(call, item, call.keys, seen, [&](const Int8* block, int64_t offset, int64_t at, int64_t count) {
        const Int8* from = block + vectors + offset * kScaleElements<Int8>;
        __builtin_memcpy(scales + (at - seen.start), from, static_cast<size_t>(count) * sizeof(float));
    });
}

inline void load_value_scales(const Call& call, const Item& item, const Seen& seen, Float32* scales) {
    const int64_t n = call.shape.head_size, stride = n + kScaleElements<Int8>;
    for_each_block<Int8>(call, item, call.values, seen, [&](const Int8* block, int64_t offset, int64_t at, int64_t count) {
        for (int64_t i = 0; i < count; ++i) scales[at - seen.start + i].value = load_scale(block + (offset + i) * stride + n);
    });
}

inline void ask_for_key_scales(const Call& call, const Item& item, const Seen& seen) {
    const int64_t vectors = call.shape.head_size * call.shape.block_size;
    for_each_block<Int8>(call, item, call.keys, seen, [&](const Int8* block, int64_t offset, int64_t, int64_t) {
        __builtin_prefetch(block + vectors + offset * kScaleElements<Int8>, 0, 2);
    });
}

}}}  // namespace quire::QUIRE_ISA
