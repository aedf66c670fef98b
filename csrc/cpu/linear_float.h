// Linear with float32 sums of float32 products: float weights, and integer weights in the precise mode.

#pragma once

#include "linear_rows.h"

namespace quire { namespace QUIRE_ISA { namespace {

// k values of a panel that are widened together: 16 KiB of float32, half of a first-level cache.
constexpr int64_t kWideBlock = 256;

// Tiles of rows from which widening a panel once is cheaper than doing so in every tile.
constexpr int64_t kWideTiles = 4;

// Weights ahead of the ones in use that a panel is fetched.
constexpr int64_t kAhead = 1024;

// acc[R] += x[k][R] * w[k][16] for the values of k that stand together in a weight.
template <int R, class Acc, class W>
inline void add_products(Acc acc, const Float32* x, const W* w) {
    for (int64_t k = 0; k < kTogether<W>; ++k) {
        const Lanes16 weights = load_row(w, k);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc(r) = fma(splat16(x[k * R + r].value), weights, acc(r));
    }
}

#ifdef __AVX512BF16__

template <int R, class Acc>
inline void add_products(Acc acc, const Pair* x, const BFloat16* w) {
    const Ints16 weights = load_words(w);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc(r) = dot(x[r], weights, acc(r));
}

#endif

// sums[R][stride] += x[k][R] * w[k][16], for P panels `panel_stride` elements apart; weights that are `ahead` elements further
// on are fetched: at a panel's end those of the panel that comes next beside the same ones.
template <int R, int P, class X, class W>
inline void multiply_tile(Float32* sums, int64_t stride, const X* x, const W* w, int64_t panel_stride, int64_t count,
                          int64_t ahead, bool fresh) {
    Lanes16 acc[R][P];
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) acc[r][p] = fresh ? splat16(0.0f) : load16(sums + r * stride + p * kPanel);
    }
    const int64_t within = P > 1 && count > ahead / kPanel ? count - ahead / kPanel : count;
    int64_t k = 0;
    const auto add_until = [&](int64_t end, int64_t fetched) {
        for (; k < end; k += kTogether<W>) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                const W* row = w + p * panel_stride + k * kPanel;
                __builtin_prefetch(row + fetched);
                add_products<R>([&](int r) -> Lanes16& { return acc[r][p]; }, x + k / kTogether<X> * R, row);
            }
        }
    };
    add_until(within, ahead);
    add_until(count, ahead + (P - 1) * panel_stride);
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) store16(sums + r * stride + p * kPanel, acc[r][p]);
    }
}

// Panels of one float type.
template <class W>
struct FloatPanels {
    const Weight& weight;

    static constexpr bool kDirect = true;

    int64_t depth() const { return weight.padded(); }

    const W* panel(int64_t index) const { return static_cast<const W*>(weight.data) + index * depth() * kPanel; }

    void widen(Float32* wide, int64_t index, int64_t start, int64_t count) const {
        const W* from = panel(index) + start * kPanel;
        for (int64_t k = 0; k < count; ++k) {
            const int64_t index = k % kTogether<W>;
            store16(wide + k * kPanel, load_row(from + (k - index) * kPanel, index));
        }
    }

    void scale(Float32*, int64_t) const {}
};

template <class Panels, class Rows>
struct FloatKernel {
    const Linear& job;
    Panels panels;

    using X = typename Rows::X;

    static constexpr int kMostRows = Rows::kMost;

    // What can be multiplied only as it lies is not widened.
    static constexpr bool kWidens = kTogether<X> == 1;

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
        const int64_t rows = tiling.size(tile), inputs = job.weight.inputs;
        X* out = const_cast<X*>(packed(tiling.start(tile)));
        for (int64_t r = 0; r < rows; ++r) {
            const Float32* x = job.row(tiling.start(tile) + r);
            for (int64_t start = 0; start < panels.depth(); start += kWideBlock) {
                X values[kWideBlock] = {};
                const int64_t left = inputs - start, wanted = panels.depth() - start;
                Rows::take(values, x + start, left < kWideBlock ? left : kWideBlock);
                const int64_t count = (wanted < kWideBlock ? wanted : kWideBlock) / kTogether<X>;
                X* to = out + start / kTogether<X> * rows + r;
                for (int64_t k = 0; k < count; ++k) to[k * rows] = values[k];
            }
        }
    }

    void multiply(const Tiling& tiling, Tiles tiles, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        const int64_t stride = count * kPanel, start = tiling.start(tiles.begin), rows = tiling.start(tiles.end) - start;
        if (Panels::kDirect && tiling.tiles == 1) multiply_tile_of_rows(sums, tiling, panel, count);
        else for (int64_t p = 0; p < count; ++p) multiply_panel(sums + p * kPanel, stride, tiling, tiles, panel + p);
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t p = 0; p < count; ++p) panels.scale(sums + row * stride + p * kPanel, panel + p);
            finish_row(job, start + row, panel, count, sums + row * stride);
        }
    }

    // All rows are one tile: panels are read side by side.
    void multiply_tile_of_rows(Float32* sums, const Tiling& tiling, int64_t panel, int64_t count) const {
        if constexpr (Panels::kDirect) {
            const int64_t depth = panels.depth();
            with_rows<kMostRows>(tiling.rows, [&](auto rows) {
                constexpr int R = decltype(rows)::value;
                for_panels<R, kMostRows, 4>(count, [&](auto width, int64_t p) {
                    multiply_tile<R, decltype(width)::value>(sums + p * kPanel, count * kPanel, activations(0),
                                                             panels.panel(panel + p), depth * kPanel, depth, kAhead, true);
                });
            });
        }
    }

    // Block after block of k, each for all tiles while it is in the first-level cache, and the next one on its way there.
    void multiply_panel(Float32* sums, int64_t stride, const Tiling& tiling, Tiles tiles, int64_t panel) const {
        alignas(64) Float32 wide[kWidens ? kWideBlock * kPanel : 1];
        const int64_t depth = panels.depth(), first_row = tiling.start(tiles.begin);
        const bool widens = kWidens && (!Panels::kDirect || tiles.end - tiles.begin >= kWideTiles);
        for (int64_t start = 0; start < depth; start += kWideBlock) {
            const int64_t size = depth - start < kWideBlock ? depth - start : kWideBlock;
            if constexpr (kWidens) {
                if (widens) panels.widen(wide, panel, start, size);
            }
            for (int64_t index = tiles.begin; index < tiles.end; ++index) {
                const int64_t row = tiling.start(index);
                Float32* own = sums + (row - first_row) * stride;
                with_rows<kMostRows>(tiling.size(index), [&](auto rows) {
                    constexpr int R = decltype(rows)::value;
                    const X* x = activations(row) + start / kTogether<X> * R;
                    auto multiply = [&](const auto* weights, int64_t ahead) {
                        multiply_tile<R, 1>(own, stride, x, weights, int64_t{0}, size, ahead, start == 0);
                    };
                    if constexpr (kWidens) {
                        if (widens) return multiply(wide, 0);
                    }
                    if constexpr (Panels::kDirect) multiply(panels.panel(panel) + start * kPanel, kWideBlock * kPanel);
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
