// SPDX-License-Identifier: Apache-2.0
// A few rows of bfloat16 weights by vectors, with the bits of tiles (linear_amx_float.h).
//
// Such rows wait for memory, and vectors are loaded from it faster than tiles are. Tiles take numbers below the normal ones as 0,
// and make none.

#pragma once

#include "float_mode.h"
#include "linear_float.h"
#include "tiles.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kFlushed = kFloatMode | 0x8040;  // both bits of MXCSR

struct FewRowsKernel {
    const Linear& job;
    FloatPanels<BFloat16> panels;

    static constexpr int kMostRows = 4, kMostSums = 8;
    static constexpr bool kEven = true;

    // Rows of k, rounded to bfloat16 and widened again.
    Float32* packed(int64_t row) const { return static_cast<Float32*>(job.scratch) + row * panels.depth(); }

    void pack(const Tiling& tiling, int64_t tile) const {
        const int64_t inputs = job.weight.inputs;
        for (int64_t row = tiling.start(tile); row < tiling.start(tile + 1); ++row) {
            Rounded::take(packed(row), job.row(row), inputs);
            for (int64_t k = inputs; k < panels.depth(); ++k) packed(row)[k] = {0.0f};
        }
    }

    void multiply(const Tiling& tiling, Tiles tiles, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        const int64_t start = tiling.start(tiles.begin), rows = tiling.start(tiles.end) - start;
        set_float_mode(kFlushed);
        for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
            const int64_t row = tiling.start(tile);
            with_rows<kMostRows>(tiling.size(tile), [&](auto size) {
                constexpr int R = decltype(size)::value;
                for_panels<R, kMostSums, 4>(count, [&](auto width, int64_t p) {
                    Float32* to = sums + ((row - start) * count + p) * kPanel;
                    multiply_rows<R, decltype(width)::value>(to, count * kPanel, packed(row), panel + p);
                });
            });
        }
        set_float_mode(kFloatMode);
        Outputs(job, panel, count).write(start, rows, sums);
    }

private:
    // Is called, lest the compiler take arithmetic out of the mode in which it is done.
    template <int R, int P>
    __attribute__((noinline)) void multiply_rows(Float32* sums, int64_t stride, const Float32* x, int64_t panel) const {
        const int64_t depth = panels.depth(), panel_stride = depth * kPanel;
        const BFloat16* w = panels.panel(panel);
        const auto fetch = fetch_weights<P>(w, panel_stride, depth, kAhead);
        Lanes16 total[R][P];
        for (int r = 0; r < R; ++r) {
            for (int p = 0; p < P; ++p) total[r][p] = splat16(0.0f);
        }
        for (int64_t k = 0; k < depth; k += kTileK) {
            Lanes16 first[R][P], second[R][P];
            for (int r = 0; r < R; ++r) {
                for (int p = 0; p < P; ++p) first[r][p] = second[r][p] = splat16(0.0f);
            }
            const int64_t end = smaller_of(k + kTileK, depth);
            for (int64_t i = k; i < end; i += 2) {
                fetch(i);
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) {
                    const Ints16 pairs = load_words(w + p * panel_stride + i * kPanel);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) {
                        const Float32* of_row = x + r * depth + i;
                        first[r][p] = fma(splat16(of_row[0].value), high_halves(pairs), first[r][p]);
                        second[r][p] = fma(splat16(of_row[1].value), low_halves(pairs), second[r][p]);
                    }
                }
            }
            for (int r = 0; r < R; ++r) {
                for (int p = 0; p < P; ++p) total[r][p] = total[r][p] + (first[r][p] + second[r][p]);
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int p = 0; p < P; ++p) store16(sums + r * stride + p * kPanel, total[r][p]);
        }
    }

    static constexpr int64_t kTileK = kTileBytes / 2;
};

}}}  // namespace quire::QUIRE_ISA
