// SPDX-License-Identifier: Apache-2.0
// One tile of latents for all rows of an item: all heads of some queries.
//
// A latent is read as a row, [rank + rope size], by both products. Its score with sixteen rows is computed at once, which
// have their queries side by side, so nothing is transposed; as a value it is its first `rank` elements. A cache in 16 bits is
// read through a float32 copy of the tile, which so many rows pay for.

#pragma once

#include "attention_tile.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Queries come in two parts: what meets the latent, and what meets the key that is rotated.
struct LatentCall : Call {
    const void* q_rope;
    int64_t rope_token_stride, rope_head_stride;
};

// Into lane `row` of sixteen rows' [n][16].
template <class T>
inline void load_query(Float32* rows, const T* q, int64_t n, int64_t row, float scale) {
    for_each_vector(n, [&](int64_t d, auto lanes) {
        Float32 scaled[kLanes];
        store(scaled, load(q + d, lanes) * scale, All{});
        for (int64_t i = 0; i < kLanes && d + i < n; ++i) rows[(d + i) * kPiece + row] = scaled[i];
    });
}

// Queries lie as [pieces of sixteen rows][head size][16], multiplied by the scale of scores; of rows that are not, 0.
template <class T>
void load_latent_queries(Float32* rows, const Call& base, const Item& item) {
    const auto& call = static_cast<const LatentCall&>(base);
    const int64_t n = call.shape.head_size, rank = call.value_size, count = item.rows(call);
    __builtin_memset(rows, 0, static_cast<size_t>(round_up(count, kPiece) * n) * sizeof(Float32));
    for (int64_t row = 0; row < count; ++row) {
        const int64_t token = item.token + row / call.group, head = row % call.group;
        const T* q = static_cast<const T*>(call.q) + token * call.token_stride + head * call.head_stride;
        const T* rope = static_cast<const T*>(call.q_rope) + token * call.rope_token_stride + head * call.rope_head_stride;
        Float32* piece = rows + row / kPiece * kPiece * n;
        load_query(piece, q, rank, row % kPiece, call.scale);
        load_query(piece + rank * kPiece, rope, n - rank, row % kPiece, call.scale);
    }
}

// The scores of R latents, from `position` in the tile on, with the sixteen rows of a piece, of which `count` exist.
template <int R>
inline void score_latents(Float32* scores, const Float32* queries, const Pieces<Float32>& latents, int64_t position, int64_t n,
                          int64_t count) {
    const Float32* at[R];
    for (int r = 0; r < R; ++r) at[r] = latents.at[(position + r) / kPiece] + (position + r) % kPiece * latents.stride;
    const Float32* const side[1] = {queries};
    Sums<R, 1> sums;
    sums.clear();
    sums.add([&at](int r, int64_t d) { return at[r][d].value; }, side, kPiece, n, side, 0);
    Float32 made[R * kPiece];
    sums.finish(made, kPiece);
    for (int64_t row = 0; row < count; ++row)
        for (int r = 0; r < R; ++r) scores[row * kKeyTile + position + r] = made[r * kPiece + row];
}

// scores = queries * latents, for what a piece of rows sees.
inline void score_tile_of_latents(const Call& call, const Item& item, const Scratch& scratch, const Seen& tile,
                                  const Pieces<Float32>& latents) {
    const int64_t n = call.shape.head_size, rows = item.rows(call);
    for (int64_t row = 0; row < rows; row += kPiece) {
        const int64_t count = smaller_of(kPiece, rows - row);
        const Seen seen = tile.by_rows(call, item, row, count);
        if (seen.is_empty()) continue;
        for_each_row_block(seen.high - seen.start, [&](auto block, int64_t position) {
            score_latents<decltype(block)::value>(scratch.scores + row * kKeyTile, scratch.queries + row * n, latents,
                                                  position, n, count);
        });
    }
}

template <class C>
inline Pieces<Float32> latents_of(const Call& call, const Item& item, const Seen& seen, Float32* tile) {
    if constexpr (std::is_same_v<C, Float32>) {
        if (call.shape.block_size % kPiece == 0) return cached_values<C>(call, item, seen);
    }
    return copied_values<C>(call, item, seen, tile);
}

template <class C>
void attend_latents(const Call& call, const Item& item, int64_t tile, const Scratch& scratch) {
    const Seen seen(call, item, tile);
    const Pieces<Float32> latents = latents_of<C>(call, item, seen, scratch.tile), nothing_ahead{{}, 0};
    score_tile_of_latents(call, item, scratch, seen, latents);
    weigh(call, item, seen, scratch.scores, scratch.split.running, scratch.factors);
    mix(call, item, scratch, seen, latents, nothing_ahead);
}

}}}  // namespace quire::QUIRE_ISA
