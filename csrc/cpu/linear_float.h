// Linear with float32 sums of float32 products: float weights, and integer weights in the precise mode.

#pragma once

#include "linear.h"

namespace quire { namespace QUIRE_ISA { namespace {

// k values of a panel that are widened together: 16 KiB of float32, half of a first-level cache.
constexpr int64_t kWideBlock = 256;

// Tiles of rows from which widening a panel once is cheaper than doing so in every tile.
constexpr int64_t kWideTiles = 4;

// Weights ahead of the ones in use that a panel is fetched.
constexpr int64_t kAhead = 512;

// sums[R][stride] += x[k][R] * w[k][16], for P panels `panel_stride` elements apart; weights that are
// `ahead` elements further on are fetched.
template <int R, int P, class W>
inline void multiply_tile(Float32* sums, int64_t stride, const Float32* x, const W* w, int64_t panel_stride, int64_t count,
                          int64_t ahead, bool fresh) {
    Lanes16 acc[R][P];
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) acc[r][p] = fresh ? splat16(0.0f) : load16(sums + r * stride + p * kPanel);
    }
    for (int64_t k = 0; k < count; ++k) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const W* row = w + p * panel_stride + k * kPanel;
            __builtin_prefetch(row + ahead);
            const Lanes16 weights = load_row(row);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) acc[r][p] = fma(splat16(x[k * R + r].value), weights, acc[r][p]);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) store16(sums + r * stride + p * kPanel, acc[r][p]);
    }
}

// Panels of one float type.
template <class W>
struct FloatPanels {
    const Weight& weight;

    static constexpr bool kDirect = true;

    const W* panel(int64_t index) const { return static_cast<const W*>(weight.data) + index * weight.inputs * kPanel; }

    void widen(Float32* wide, int64_t index, int64_t start, int64_t count) const {
        const W* from = panel(index) + start * kPanel;
        for (int64_t k = 0; k < count; ++k) store16(wide + k * kPanel, load_row(from + k * kPanel));
    }

    void scale(Float32*, int64_t) const {}
};

template <class Panels>
struct FloatKernel {
    const Linear& job;
    Panels panels;

    static constexpr int kMostRows = kFloatRows;

    Float32* packed(int64_t row) const { return static_cast<Float32*>(job.scratch) + row * job.weight.inputs; }

    // One row is its own tile.
    bool in_place() const { return job.rows == 1; }

    void pack(int64_t first, const Tiling& tiling, int64_t tile) const {
        if (in_place()) return;
        const int64_t rows = tiling.size(tile), inputs = job.weight.inputs;
        Float32* out = packed(tiling.start(tile));
        for (int64_t r = 0; r < rows; ++r) {
            const Float32* x = job.x + (first + tiling.start(tile) + r) * inputs;
            for (int64_t k = 0; k < inputs; ++k) out[k * rows + r] = x[k];
        }
    }

    void multiply(int64_t first, const Tiling& tiling, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        const int64_t stride = count * kPanel;
        if (Panels::kDirect && tiling.tiles == 1) multiply_tile_of_rows(sums, tiling, panel, count);
        else for (int64_t p = 0; p < count; ++p) multiply_panel(sums + p * kPanel, stride, tiling, panel + p);
        for (int64_t row = 0; row < tiling.rows; ++row) {
            for (int64_t p = 0; p < count; ++p) panels.scale(sums + row * stride + p * kPanel, panel + p);
            finish_row(job, first + row, panel, count, sums + row * stride);
        }
    }

    // All rows are one tile: panels are read side by side.
    void multiply_tile_of_rows(Float32* sums, const Tiling& tiling, int64_t panel, int64_t count) const {
        if constexpr (Panels::kDirect) {
            with_rows<kMostRows>(tiling.rows, [&](auto rows) {
                constexpr int R = decltype(rows)::value;
                for_panels<R, kMostRows>(count, [&](auto width, int64_t p) {
                    multiply_tile<R, decltype(width)::value>(sums + p * kPanel, count * kPanel, in_place() ? job.x : packed(0),
                                                             panels.panel(panel + p), job.weight.inputs * kPanel,
                                                             job.weight.inputs, kAhead, true);
                });
            });
        }
    }

    // Block after block of k, each for all tiles while it is in the first-level cache, and the next one on its way there.
    void multiply_panel(Float32* sums, int64_t stride, const Tiling& tiling, int64_t panel) const {
        alignas(64) Float32 wide[kWideBlock * kPanel];
        const int64_t inputs = job.weight.inputs;
        const bool widens = !Panels::kDirect || tiling.tiles >= kWideTiles;
        for (int64_t start = 0; start < inputs; start += kWideBlock) {
            const int64_t size = inputs - start < kWideBlock ? inputs - start : kWideBlock;
            if (widens) panels.widen(wide, panel, start, size);
            for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
                const int64_t row = tiling.start(tile);
                with_rows<kMostRows>(tiling.size(tile), [&](auto rows) {
                    constexpr int R = decltype(rows)::value;
                    const Float32* x = (in_place() ? job.x : packed(row)) + start * R;
                    auto multiply = [&](const auto* weights, int64_t ahead) {
                        multiply_tile<R, 1>(sums + row * stride, stride, x, weights, int64_t{0}, size, ahead, start == 0);
                    };
                    if (widens) multiply(wide, 0);
                    else if constexpr (Panels::kDirect) multiply(panels.panel(panel) + start * kPanel, kWideBlock * kPanel);
                });
            }
        }
    }
};

template <class Panels>
inline void run_float(const Linear& job, Panels panels) {
    run(job, FloatKernel<Panels>{job, panels});
}

}}}  // namespace quire::QUIRE_ISA
