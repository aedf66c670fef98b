// The arithmetic of attention on one tile of keys: products, online softmax, and the merging of independent parts.
//
// Everything here treats rows (a query of one head) independently, and each row's numbers are added in the order of the
// keys' positions; how many rows are blocked together changes no bit.

#pragma once

#include "prefetch.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kKeyTile = 64;    // keys that share one step of the running maximum
constexpr int64_t kMaxRowBlock = 6; // rows whose accumulators fit the registers

// c[r][n] = c[r][n] * factor[r] + sum over k, in order, of a[r][k] * b[k][n]; without factors c starts at 0.
struct Product {
    Float32* c;
    int64_t c_stride;
    const float* factors;
    const Float32* a;
    int64_t a_stride;
    const Float32* b;
    int64_t b_stride, depth;
};

// R rows by N vectors in registers, from column `column`.
template <int R, int N>
inline void multiply_block(const Product& p, int64_t row, int64_t column) {
    Vec sums[R][N];
    Float32* c = p.c + row * p.c_stride + column;
    const Float32* a = p.a + row * p.a_stride;
    const Float32* b = p.b + column;
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n)
            sums[r][n] = p.factors ? load(c + r * p.c_stride + n * kLanes, All{}) * p.factors[row + r] : Vec{};
    for (int64_t k = 0; k < p.depth; ++k, b += p.b_stride) {
        Vec columns[N];
        for (int n = 0; n < N; ++n) columns[n] = load(b + n * kLanes, All{});
        for (int r = 0; r < R; ++r) {
            const Vec x = splat(a[r * p.a_stride + k].value);
            for (int n = 0; n < N; ++n) sums[r][n] = fma(x, columns[n], sums[r][n]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(c + r * p.c_stride + n * kLanes, sums[r][n], All{});
}

// R rows by all columns: N vectors at a time, then fewer.
template <int R, int N>
inline void multiply_rows(const Product& p, int64_t column, int64_t columns, int64_t row, Prefetcher& next, int64_t lines) {
    for (; column + N * kLanes <= columns; column += N * kLanes) {
        next.ask(N * lines);
        multiply_block<R, N>(p, row, column);
    }
    if constexpr (N > 1) multiply_rows<R, N / 2>(p, column, columns, row, next, lines);
}

// Rows in blocks of nearly equal size; `columns` is a multiple of the vector length. Meanwhile `next` is fetched.
inline void multiply(const Product& p, int64_t rows, int64_t columns, Prefetcher next) {
    const int64_t blocks = (rows + kMaxRowBlock - 1) / kMaxRowBlock;
    const int64_t lines = (next.lines() + blocks * columns / kLanes) / (blocks * columns / kLanes);
    for (int64_t i = 0; i < blocks; ++i) {
        const int64_t row = rows * i / blocks;
        switch (rows * (i + 1) / blocks - row) {
            case 1: multiply_rows<1, 8>(p, 0, columns, row, next, lines); break;
            case 2: multiply_rows<2, 4>(p, 0, columns, row, next, lines); break;
            case 3: multiply_rows<3, 4>(p, 0, columns, row, next, lines); break;
            case 4: multiply_rows<4, 2>(p, 0, columns, row, next, lines); break;
            case 5: multiply_rows<5, 2>(p, 0, columns, row, next, lines); break;
            default: multiply_rows<6, 2>(p, 0, columns, row, next, lines); break;
        }
    }
}

// What a query may see, and how its scores are changed. Scores are in units of log 2.
struct Features {
    int64_t window;       // 0: none
    float soft_cap;       // 0: none
    const float* slopes;  // one for each query head; null: none
};

inline Vec lane_offsets(int64_t first) {
    return Vec{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<float>(first);
}

// Soft cap and linear bias (ALiBi) on a row's scores; `distance` is from the query back to the tile's first key.
inline void apply_features(Float32* scores, int64_t columns, const Features& features, float slope, int64_t distance) {
    for (int64_t i = 0; i < columns; i += kLanes) {
        Vec s = load(scores + i, All{});
        if (features.soft_cap != 0.0f) s = features.soft_cap * tanh(s / features.soft_cap);
        if (features.slopes) s = s - slope * (static_cast<float>(distance) - lane_offsets(i));
        store(scores + i, s, All{});
    }
}

// -infinity outside [low, high): a selection, so that whatever stands there, NaN included, is gone.
inline void mask_row(Float32* scores, int64_t columns, int64_t low, int64_t high) {
    for (int64_t i = 0; i < columns; i += kLanes) {
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

// 2^(from - to), exactly 1 if nothing changed, and 0 if nothing was seen before.
inline float rescale(float from, float to) { return from == to ? 1.0f : exp2(splat(from - shift_of(to)))[0]; }

// Scores to weights relative to the new maximum (Milakov and Gimelshein, 2018, arXiv:1805.02867). Returns what earlier
// weights have to be multiplied with. Keys of weight 0 change nothing, not even a bit.
inline float softmax_row(Float32* scores, int64_t columns, Running& running) {
    Vec top = splat(running.top);
    for (int64_t i = 0; i < columns; i += kLanes) top = larger(load(scores + i, All{}), top);
    const float new_top = largest(top), shift = shift_of(new_top);
    Vec total = {};
    for (int64_t i = 0; i < columns; i += kLanes) {
        const Vec weight = exp2(load(scores + i, All{}) - shift);
        total = total + weight;
        store(scores + i, weight, All{});
    }
    const float factor = rescale(running.top, new_top);
    running = {new_top, running.sum * factor + sum(total)};
    return factor;
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
