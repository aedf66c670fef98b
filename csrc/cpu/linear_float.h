// Linear with float32 sums of float32 products: float weights, and integer weights in the precise mode.

#pragma once

#include "linear.h"

namespace quire { namespace QUIRE_ISA { namespace {

// k values of a panel that are widened together: 16 KiB of float32, half of a first-level cache.
constexpr int64_t kWideBlock = 256;

// Tiles of rows from which widening a panel once is cheaper than doing so in every tile.
constexpr int64_t kWideTiles = 4;

// PanelBytes ahead of the one in use that a panel is fetched.
constexpr int64_t kPrefetch = 1024;

// sums[R][stride] += x[k][R] * w[k][16], for P panels `panel_stride` elements apart.
template <int R, int P, class W>
inline void multiply_tile(Float32* sums, int64_t stride, const Float32* x, const W* w, int64_t panel_stride, int64_t count,
                          bool fresh) {
    Vec acc[R][P][2];
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) {
            for (int h = 0; h < 2; ++h) {
                acc[r][p][h] = fresh ? Vec{} : load(sums + r * stride + p * kPanel + h * kLanes, All{});
            }
        }
    }
    for (int64_t k = 0; k < count; ++k) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const W* row = w + p * panel_stride + k * kPanel;
            __builtin_prefetch(reinterpret_cast<const char*>(row) + kPrefetch);
            const Lanes16 weights = load16(row);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const Vec value = splat(x[k * R + r].value);
                acc[r][p][0] = fma(value, weights.low, acc[r][p][0]);
                acc[r][p][1] = fma(value, weights.high, acc[r][p][1]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) {
            for (int h = 0; h < 2; ++h) store(sums + r * stride + p * kPanel + h * kLanes, acc[r][p][h], All{});
        }
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
        for (int64_t k = 0; k < count; ++k) {
            const Lanes16 lanes = load16(from + k * kPanel);
            store(wide + k * kPanel, lanes.low, All{});
            store(wide + k * kPanel + kLanes, lanes.high, All{});
        }
    }

    void scale(Float32*, int64_t) const {}
};

template <class Panels>
struct FloatKernel {
    const Linear& job;
    Panels panels;

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
        if (Panels::kDirect && tiling.tiles < kWideTiles) multiply_direct(sums, tiling, panel, count);
        else multiply_wide(sums, tiling, panel, count);
        for (int64_t row = 0; row < tiling.rows; ++row) {
            for (int64_t p = 0; p < count; ++p) panels.scale(sums + row * stride + p * kPanel, panel + p);
            finish_row(job, first + row, panel, count, sums + row * stride);
        }
    }

    void multiply_direct(Float32* sums, const Tiling& tiling, int64_t panel, int64_t count) const {
        if constexpr (Panels::kDirect) {
            const int64_t inputs = job.weight.inputs, stride = count * kPanel;
            for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
                const int64_t start = tiling.start(tile);
                const Float32* x = in_place() ? job.x : packed(start);
                with_rows(tiling.size(tile), [&](auto rows) {
                    constexpr int R = decltype(rows)::value, P = R == 1 ? 4 : R <= 3 ? 2 : 1;
                    int64_t p = 0;
                    for (; p + P <= count; p += P) {
                        multiply_tile<R, P>(sums + start * stride + p * kPanel, stride, x, panels.panel(panel + p),
                                            inputs * kPanel, inputs, true);
                    }
                    for (; p < count; ++p) {
                        multiply_tile<R, 1>(sums + start * stride + p * kPanel, stride, x, panels.panel(panel + p),
                                            int64_t{0}, inputs, true);
                    }
                });
            }
        }
    }

    void multiply_wide(Float32* sums, const Tiling& tiling, int64_t panel, int64_t count) const {
        alignas(64) Float32 wide[kWideBlock * kPanel];
        const int64_t inputs = job.weight.inputs, stride = count * kPanel;
        for (int64_t p = 0; p < count; ++p) {
            for (int64_t start = 0; start < inputs; start += kWideBlock) {
                const int64_t size = inputs - start < kWideBlock ? inputs - start : kWideBlock;
                panels.widen(wide, panel + p, start, size);
                for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
                    const int64_t row = tiling.start(tile);
                    with_rows(tiling.size(tile), [&](auto rows) {
                        constexpr int R = decltype(rows)::value;
                        const Float32* x = (in_place() ? job.x : packed(row)) + start * R;
                        multiply_tile<R, 1>(sums + row * stride + p * kPanel, stride, x, wide, int64_t{0}, size,
                                            start == 0);
                    });
                }
            }
        }
    }
};

template <class Panels>
inline void run_float(const Linear& job, Panels panels) {
    run(job, FloatKernel<Panels>{job, panels});
}

}}}  // namespace quire::QUIRE_ISA
