// SPDX-License-Identifier: Apache-2.0
// One tile of keys and values that lie in the step's own rows, for all rows of an item.
//
// Keys are turned on their way, eight by eight, into the form in which products read them. Values are read where they lie
// if they are float32 in whole pieces, else through a copy. Both give the same bits.

#pragma once

#include "attention_tile.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Keys and values are rows of the step, as queries are.
struct RowsCall : Call {
    int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
};

// Where the key, or the value, of an item's head begins at the first position of its request.
template <class T>
inline const T* first_row(const void* rows, const Item& item, int64_t token_stride, int64_t head_stride) {
    return static_cast<const T*>(rows) + (item.token - item.position) * token_stride + item.head * head_stride;
}

// The keys that are seen, as [head size][kTileStride], in whole pieces; what is no key is 0, as in `clear_columns`.
template <class T>
inline void turn_keys(const RowsCall& call, const Item& item, const Seen& seen, Float32* tile) {
    const T* keys = first_row<T>(call.keys, item, call.k_token_stride, call.k_head_stride);
    for (int64_t at = seen.first_piece() * kPiece; at < seen.end_piece() * kPiece; at += kLanes) {
        const int64_t count = smaller_of(seen.high - seen.start - at, kLanes);
        const T* first = keys + (seen.start + at) * call.k_token_stride;
        for (int64_t d = 0; d < call.shape.head_size; d += kLanes) {
            Vec square[kLanes] = {};
            for (int64_t i = 0; i < count; ++i) square[i] = load(first + i * call.k_token_stride + d, All{});
            transpose(square);
            for (int64_t i = 0; i < kLanes; ++i) store(tile + (d + i) * kTileStride + at, square[i], All{});
        }
    }
}

inline Pieces<Float32> turned_keys(Float32* tile) {
    Pieces<Float32> pieces{{}, kTileStride};
    for (int64_t p = 0; p < kTilePieces; ++p) pieces.at[p] = tile + p * kPiece;
    return pieces;
}

template <class T>
inline Pieces<Float32> values_of(const RowsCall& call, const Item& item, const Seen& seen, Float32* tile) {
    const int64_t n = call.shape.head_size;
    const T* values = first_row<T>(call.values, item, call.v_token_stride, call.v_head_stride) + seen.start * call.v_token_stride;
    Pieces<Float32> pieces{{}, row_floats(n) + kPadding};
    if constexpr (std::is_same_v<T, Float32>) {
        if (n % kPiece == 0) {
            pieces.stride = call.v_token_stride;
            for (int64_t p = seen.first_piece(); p < seen.end_piece(); ++p) pieces.at[p] = values + p * kPiece * pieces.stride;
            return pieces;
        }
    }
    for (int64_t key = seen.low - seen.start; key < seen.high - seen.start; ++key)
        for (int64_t d = 0; d < n; d += kLanes)
            store(tile + key * pieces.stride + d, load(values + key * call.v_token_stride + d, All{}), All{});
    for (int64_t p = 0; p < kTilePieces; ++p) pieces.at[p] = tile + p * kPiece * pieces.stride;
    return pieces;
}

template <class T>
void attend_rows(const Call& base, const Item& item, int64_t tile, const Scratch& scratch) {
    const auto& call = static_cast<const RowsCall&>(base);
    const Seen seen(call, item, tile);
    turn_keys<T>(call, item, seen, scratch.tile);
    const Pieces<Float32> keys = turned_keys(scratch.tile);
    score(call, item, scratch, seen, keys, keys);
    weigh(call, item, seen, scratch.scores, scratch.split.running, scratch.factors);
    const Pieces<Float32> values = values_of<T>(call, item, seen, scratch.tile);
    mix(call, item, scratch, seen, values, values);
}

}}}  // namespace quire::QUIRE_ISA
