// SPDX-License-Identifier: Apache-2.0
// Linear with float32 sums of float32 products: float weights, and integer weights in the precise mode.

#pragma once

#include "linear_rows.h"
#include "memory.h"

namespace quire { namespace QUIRE_ISA { namespace {

// k values that are widened together, for a panel or shared by two: 16 KiB of float32, half of a first-level cache.
constexpr int64_t kWideBlock = 256;

// As many that are read where they lie: they come from the second-level cache.
constexpr int64_t kDirectBlock = 768;

// Tiles of rows from which widening a panel once is cheaper than doing so in every tile.
constexpr int64_t kWideTiles = 4;

// Values of k that are packed together.
constexpr int64_t kPackBlock = 64;

// Values of k ahead of the one in use whose weights are fetched.
constexpr int64_t kAhead = 64;

// acc[R][P] += x[k][R] * w[P][k][16] for the values of k that stand together in a weight. Where registers hold the weights of
// all panels, each activation is read once.
template <int R, int P, class W>
inline __attribute__((always_inline)) void add_products(Lanes16 (&acc)[R][P], const Float32* x, const W* w, int64_t panel_stride) {
    for (int64_t k = 0; k < kTogether<W>; ++k) {
        if constexpr (kWidePanels > 1) {
            Lanes16 weights[P];
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) weights[p] = load_row(w + p * panel_stride, k);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Lanes16 value = splat16(x[k * R + r].value);
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) acc[r][p] = fma(value, weights[p], acc[r][p]);
            }
        } else {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                const Lanes16 weights = load_row(w + p * panel_stride, k);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) acc[r][p] = fma(splat16(x[k * R + r].value), weights, acc[r][p]);
            }
        }
    }
}

#ifdef __AVX512BF16__

template <int R, int P>
inline __attribute__((always_inline)) void add_products(Lanes16 (&acc)[R][P], const Pair* x, const BFloat16* w, int64_t panel_stride) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
        const Ints16 weights = load_words(w + p * panel_stride);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[r][p] = dot(x[r], weights, acc[r][p]);
    }
}

#endif

// sums[R][stride] += x[k][R] * w[k][16], for P panels `panel_stride` elements apart; `fetch` is called with each k,
// and prefetches what comes later.
template <int R, int P, class X, class W, class Fetch>
inline void multiply_tile(Float32* sums, int64_t stride, const X* x, const W* w, int64_t panel_stride, int64_t count, bool fresh,
                          Fetch fetch) {
    Lanes16 acc[R][P];
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) acc[r][p] = fresh ? splat16(0.0f) : load16(sums + r * stride + p * kPanel);
    }
    for (int64_t k = 0; k < count; k += kTogether<W>) {
        fetch(k);
        add_products<R, P>(acc, x + k / kTogether<X> * R, w + k * kPanel, panel_stride);
    }
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) store16(sums + r * stride + p * kPanel, acc[r][p]);
    }
}

// Fetches weights of P panels that are `ahead` values of k further on; of k there are `count` until the panels end, and behind
// them come those of the panels that are next.
template <int P, class W>
inline auto fetch_weights(const W* w, int64_t panel_stride, int64_t count, int64_t ahead) {
    return [=](int64_t k) {
        const bool is_behind = P > 1 && k + ahead >= count;
        const W* at = w + (k + ahead) * kPanel + (is_behind ? (P - 1) * panel_stride : 0);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) __builtin_prefetch(at + p * panel_stride);
    };
}

// Panels of one float type.
template <class W>
struct FloatPanels {
    const Weight& weight;

    static constexpr bool kDirect = true, kWide = std::is_same_v<W, Float32>;

    int64_t depth() const { return weight.padded(); }

    const W* panel(int64_t index) const { return static_cast<const W*>(weight.data) + index * depth() * kPanel; }

    void widen(Float32* wide, int64_t index, int64_t start, int64_t count) const {
        const W* from = panel(index) + start * kPanel;
        for (int64_t k = 0; k < count; ++k) {
            const int64_t index = k % kTogether<W>;
            store16(wide + k * kPanel, load_row(from + (k - index) * kPanel, index));
        }
    }
};

template <class Panels, class Rows>
struct FloatKernel {
    const Linear& job;
    Panels panels;

    using X = typename Rows::X;

    static constexpr int kMostRows = Rows::kMost;
    static constexpr bool kEven = true;

    // Whether products of several tiles with a panel read its weights as float32, and whether those have to be made.
    static constexpr bool kReadsFloats = kTogether<X> == 1, kWidens = kReadsFloats && !Panels::kWide;

    const X* packed(int64_t row) const { return static_cast<const X*>(job.scratch) + row * panels.depth() / kTogether<X>; }

    // One row is its own tile.
    bool in_place() const { return Rows::kAsTheyAre && job.rows == 1 && job.weight.inputs == panels.depth(); }

    const X* activations(int64_t row) const {
        if constexpr (Rows::kAsTheyAre) {
            if (in_place()) return job.row(0);
        }
        return packed(row);
    }

    void pack(const Tiling& tiling, int64_t tile) const {
        if (in_place()) return;
        const int64_t rows = tiling.size(tile), first = tiling.start(tile), depth = panels.depth();
        X* out = const_cast<X*>(packed(first));
        const int64_t done = pack_squares(out, rows, first);
        for (int64_t start = done; start < depth; start += kPackBlock) {
            const int64_t left = smaller_of(job.weight.inputs - start, kPackBlock);
            const int64_t wanted = smaller_of(depth - start, kPackBlock) / kTogether<X>;
            X values[kMostRows][kPackBlock];
            if (left < kPackBlock) __builtin_memset(values, 0, sizeof values);
            for (int64_t r = 0; r < rows; ++r) Rows::take(values[r], job.row(first + r) + start, left);
            X* to = out + start / kTogether<X> * rows;
            for (int64_t k = 0; k < wanted; ++k)
                for (int64_t r = 0; r < rows; ++r) to[k * rows + r] = values[r][k];
        }
    }

    // Eight rows and values of k at once, as far as there are so many; returns for how many k it was done.
    int64_t pack_squares(X* out, int64_t rows, int64_t first_row) const {
        int64_t k = 0;
        if constexpr (kReadsFloats) {
            for (; rows >= kLanes && k + kLanes <= job.weight.inputs; k += kLanes) {
                // Of more than eight rows the last eight as well, some of them once more.
                for (int64_t first = 0;; first = rows - kLanes) {
                    Vec square[kLanes];
                    for (int64_t i = 0; i < kLanes; ++i) square[i] = Rows::some(job.row(first_row + first + i) + k, All{});
                    transpose(square);
                    for (int64_t i = 0; i < kLanes; ++i) store(out + (k + i) * rows + first, square[i], All{});
                    if (first + kLanes == rows) break;
                }
            }
        }
        return k;
    }

    void multiply(const Tiling& tiling, Tiles tiles, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        const int64_t stride = count * kPanel, start = tiling.start(tiles.begin), rows = tiling.start(tiles.end) - start;
        const Outputs outputs(job, panel, count);
        if (Panels::kDirect && tiling.tiles == 1) multiply_tile_of_rows(sums, tiling, panel, count);
        else for_panels<1, 1, Rows::kPanels>(count, [&](auto width, int64_t p) {
            multiply_panels<decltype(width)::value>(sums + p * kPanel, stride, tiling, tiles, panel + p, outputs);
        });
        outputs.write(start, rows, sums);
    }

    // All rows are one tile: panels are read side by side.
    void multiply_tile_of_rows(Float32* sums, const Tiling& tiling, int64_t panel, int64_t count) const {
        if constexpr (Panels::kDirect) {
            const int64_t depth = panels.depth(), ahead = streams_are_fetched_ahead() ? kAhead : 0;
            with_rows<kMostRows>(tiling.rows, [&](auto rows) {
                constexpr int R = decltype(rows)::value;
                for_panels<R, kMostRows * Rows::kPanels, 4>(count, [&](auto width, int64_t p) {
                    constexpr int P = decltype(width)::value;
                    const auto* weights = panels.panel(panel + p);
                    multiply_tile<R, P>(sums + p * kPanel, count * kPanel, activations(0), weights, depth * kPanel, depth, true,
                                        fetch_weights<P>(weights, depth * kPanel, depth, ahead));
                });
            });
        }
    }

    // Block after block of k, each for all tiles while it is in the first-level cache, and the next one on its way there.
    template <int P>
    void multiply_panels(Float32* sums, int64_t stride, const Tiling& tiling, Tiles tiles, int64_t panel,
                         const Outputs& outputs) const {
        constexpr int64_t kBlock = (kReadsFloats && !kWidens ? kDirectBlock : kWideBlock) / P;
        alignas(64) Float32 wide[kWidens ? P * kBlock * kPanel : 1];
        const int64_t depth = panels.depth(), first_row = tiling.start(tiles.begin);
        const bool reuses = !Panels::kDirect || tiles.end - tiles.begin >= kWideTiles;
        for (int64_t start = 0; start < depth; start += kBlock) {
            const int64_t size = depth - start < kBlock ? depth - start : kBlock;
            if constexpr (kWidens) {
                for (int p = 0; reuses && p < P; ++p) panels.widen(wide + p * kBlock * kPanel, panel + p, start, size);
            }
            for (int64_t index = tiles.begin; index < tiles.end; ++index) {
                const int64_t row = tiling.start(index);
                Float32* own = sums + (row - first_row) * stride;
                if (start + size == depth) outputs.fetch(row, tiling.size(index));
                with_rows<kMostRows>(tiling.size(index), [&](auto rows) {
                    constexpr int R = decltype(rows)::value;
                    const X* x = activations(row) + start / kTogether<X> * R;
                    auto multiply = [&](const auto* weights, int64_t panel_stride, auto fetch) {
                        multiply_tile<R, P>(own, stride, x, weights, panel_stride, size, start == 0, fetch);
                    };
                    if constexpr (kWidens) {
                        const X* next = activations(row + R) + start / kTogether<X> * R;
                        if (reuses) return multiply(wide, kBlock * kPanel, [=](int64_t k) { __builtin_prefetch(next + k * R); });
                    }
                    if constexpr (Panels::kDirect) {
                        const auto* weights = panels.panel(panel) + start * kPanel;
                        if constexpr (kReadsFloats && !kWidens) {
                            if (reuses) return multiply(weights, depth * kPanel, [](int64_t) {});
                        }
                        multiply(weights, depth * kPanel, fetch_weights<P>(weights, depth * kPanel, depth - start, kBlock));
                    }
                });
            }
        }
    }
};

// Makes the kernel of a job.
template <class Panels, class Rows = Exact>
struct MakeFloat {
    FloatKernel<Panels, Rows> operator()(const Linear& job) const { return {job, {job.weight}}; }
};

}}}  // namespace quire::QUIRE_ISA
