// SPDX-License-Identifier: Apache-2.0
// The online softmax of attention: scores of a tile to weights, and the merging of independent parts.
//
// Everything here treats rows (a query of one head) independently, and each row's numbers are added in the order of the
// keys' positions.

#pragma once

#include "attention_product.h"

namespace quire { namespace QUIRE_ISA { namespace {

inline Vec lane_offsets(int64_t first) { return Vec{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<float>(first); }

// Columns [begin, end) of a tile, in whole pieces.
struct Columns {
    int64_t begin, end;

    explicit Columns(const Seen& seen) : begin(seen.first_piece() * kPiece), end(seen.end_piece() * kPiece) {}
};

inline Vec magnitude(Vec x) { return x < 0.0f ? -x : x; }

// Soft cap and linear bias (ALiBi) on a row's scores; `distance` is from the query back to the tile's first key.
inline void apply_features(Float32* scores, Columns columns, const Features& features, float slope, int64_t distance) {
    for (int64_t i = columns.begin; i < columns.end; i += kLanes) {
        Vec s = load(scores + i, All{});
        if (features.soft_cap != 0.0f) s = features.soft_cap * tanh(s / features.soft_cap);
        if (features.slopes) s = s - slope * magnitude(static_cast<float>(distance) - lane_offsets(i));
        store(scores + i, s, All{});
    }
}

// Adds a row's biases: that of the tile's first key stands at `biases`[`first`], and there are `count` of them.
inline void add_biases(Float32* scores, Columns columns, const float* biases, int64_t first, int64_t count) {
    const auto* at = reinterpret_cast<const Float32*>(biases);
    for (int64_t i = columns.begin; i < columns.end; i += kLanes) {
        const int64_t left = count - first - i;  // the last columns may be of keys that are not
        const Vec bias = left >= kLanes ? load(at + first + i, All{}) : load(at + first + i, First{larger_of(left, 0)});
        store(scores + i, fma(bias, splat(kLog2E), load(scores + i, All{})), All{});
    }
}

// -infinity outside [low, high): a selection, so that whatever stands there, NaN included, is gone.
inline void mask_row(Float32* scores, Columns columns, int64_t low, int64_t high) {
    for (int64_t i = columns.begin; i < columns.end; i += kLanes) {
        if (i >= low && i + kLanes <= high) continue;
        const Ints lane = Ints{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<int32_t>(i);
        const Ints seen = (lane >= static_cast<int32_t>(low)) & (lane < static_cast<int32_t>(high));
        store(scores + i, seen ? load(scores + i, All{}) : splat(-__builtin_inff()), All{});
    }
}

// The state of a row: the largest score so far, and the sum of 2^(score - largest).
struct Running {
    float top, sum;
};

// What exponents are taken relative to; any number does while nothing was seen.
inline float shift_of(float top) { return top == -__builtin_inff() ? 0.0f : top; }
inline Vec shift_of(Vec top) { return top == -__builtin_inff() ? Vec{} : top; }

// 2^(from - to), exactly 1 if nothing changed, and 0 if nothing was seen before.
inline Vec rescale(Vec from, Vec to) { return from == to ? splat(1.0f) : exp2(from - shift_of(to)); }
inline float rescale(float from, float to) { return rescale(splat(from), splat(to))[0]; }

// The largest score of a row, and what it was before.
inline float top_of_row(const Float32* scores, Columns columns, float before) {
    Vec top = splat(before);
    for (int64_t i = columns.begin; i < columns.end; i += kLanes) top = larger(load(scores + i, All{}), top);
    return largest(top);
}

// The scores of a piece to weights relative to a maximum; returns the sum of these, eight after eight, and of those before.
inline Vec weigh_piece(Float32* scores, float shift, Vec total) {
#ifdef __AVX512F__
    Wide weights;
    __builtin_memcpy(&weights, scores, sizeof weights);
    weights = exp2(weights - shift);
    __builtin_memcpy(scores, &weights, sizeof weights);
    return total + low_half(weights) + high_half(weights);
#else
    for (int64_t i = 0; i < kPiece; i += kLanes) {
        const Vec weights = exp2(load(scores + i, All{}) - shift);
        total = total + weights;
        store(scores + i, weights, All{});
    }
    return total;
#endif
}

// A row's scores to weights; returns their sum.
inline float weigh_row(Float32* scores, Columns columns, float top) {
    const float shift = shift_of(top);
    Vec total = {};
    for (int64_t i = columns.begin; i < columns.end; i += kPiece) total = weigh_piece(scores + i, shift, total);
    return sum(total);
}

// What features make of a row's scores.
inline void change_row(const Call& call, const Item& item, const Seen& seen, int64_t row, Float32* scores, Columns columns) {
    const Features& features = call.features;
    const int64_t position = item.position + row / call.group, start = seen.start;
    if (features.soft_cap != 0.0f || features.slopes) {
        const float slope = features.slopes ? features.slopes[item.head * call.group + row % call.group] : 0.0f;
        apply_features(scores, columns, features, slope * kLog2E, position - start);
    }
    if (features.biases) {
        const int64_t head = item.head * call.group + row % call.group, count = 2 * features.center + 1;
        add_biases(scores, columns, features.biases + head * count, features.center + start - position, count);
    }
    const int64_t low = larger_of(features.first_key(position) - start, 0);
    const int64_t high = smaller_of(item.end_key(features, position) - start, kKeyTile);
    if (low > columns.begin || high < columns.end) mask_row(scores, columns, low, high);
}

// Whether some of `count` rows have scores that do not count, or others than their products.
inline bool are_changed(const Call& call, const Item& item, const Seen& seen, int64_t row, int64_t count, Columns columns) {
    const Features& features = call.features;
    const int64_t first = item.position + row / call.group, last = item.position + (row + count - 1) / call.group;
    const bool is_masked = features.first_key(last) - seen.start > columns.begin ||
                           item.end_key(features, first) - seen.start < columns.end;
    return is_masked || features.soft_cap != 0.0f || features.slopes || features.biases;
}

// Scores of a block of rows to weights, in all columns that one of them sees, relative to the new maximum (Milakov and
// Gimelshein, 2018, arXiv:1805.02867); `factors` are what earlier sums must be multiplied with. Keys of weight 0 change
// nothing, not even a bit. What is done once for a row is done for all of them side by side.
inline void weigh_rows(const Call& call, const Item& item, const Seen& seen, int64_t row, int64_t count, Float32* scores,
                       Running* running, float* factors) {
    constexpr int64_t kMost = (kMaxRows + kLanes - 1) / kLanes * kLanes;
    const Columns columns(seen);
    Float32 before[kMost] = {}, tops[kMost] = {}, changes[kMost];
    if (are_changed(call, item, seen, row, count, columns)) {
        for (int64_t r = 0; r < count; ++r) change_row(call, item, seen, row + r, scores + r * kKeyTile, columns);
    }
    for (int64_t r = 0; r < count; ++r) {
        before[r].value = running[r].top;
        tops[r].value = top_of_row(scores + r * kKeyTile, columns, running[r].top);
    }
    for (int64_t r = 0; r < kMost; r += kLanes)
        store(changes + r, rescale(load(before + r, All{}), load(tops + r, All{})), All{});
    for (int64_t r = 0; r < count; ++r) {
        const float sum = weigh_row(scores + r * kKeyTile, columns, tops[r].value);
        factors[r] = changes[r].value;
        running[r] = {tops[r].value, running[r].sum * factors[r] + sum};
    }
}

// The same of all rows that see the tile.
inline void weigh(const Call& call, const Item& item, const Seen& tile, Float32* scores, Running* running, float* factors) {
    const int64_t rows = item.rows(call);
    for (int64_t block = 0; block < row_blocks(rows); ++block) {
        const int64_t first = block_row(rows, block), count = block_row(rows, block + 1) - first;
        const Seen seen = tile.by_rows(call, item, first, count);
        if (seen.is_empty()) continue;
        weigh_rows(call, item, seen, first, count, scores + first * kKeyTile, running + first, factors + first);
    }
}

// What a row of such sums is multiplied with in the end. A head's sink is a key that all see, of score `sink` and value 0 (Xiao
// et al., 2023, arXiv:2309.17453); it is the last to join, once.
inline float final_factor(const Running& running, const float* sink) {
    if (!sink) return running.sum == 0.0f ? 0.0f : 1.0f / running.sum;  // 0: the row sees no key
    const float score = *sink * kLog2E, top = score > running.top ? score : running.top;
    const float kept = rescale(running.top, top), total = running.sum * kept + rescale(score, top);
    return running.sum == 0.0f ? 0.0f : kept / total;
}

// Adds a later part of a row's keys to the parts before it (Dao et al., 2022, arXiv:2205.14135).
inline void merge_row(Float32* into, Running& running, const Float32* part, const Running& part_running, int64_t n) {
    const float top = part_running.top > running.top ? part_running.top : running.top;
    const float old_factor = rescale(running.top, top), new_factor = rescale(part_running.top, top);
    running = {top, running.sum * old_factor + part_running.sum * new_factor};
    for (int64_t i = 0; i < n; i += kLanes) {
        const Vec merged = load(into + i, All{}) * old_factor + load(part + i, All{}) * new_factor;
        store(into + i, merged, All{});
    }
}

}}}  // namespace quire::QUIRE_ISA
