// SPDX-License-Identifier: Apache-2.0
// bfloat16 weights by AMX, activations rounded to bfloat16.
//
// Of 32 k the first ones of all pairs are added in turn, and so are the second ones; then both sums, and what they are added
// to, are added; linear_amx_rows.h has the same bits for a few rows. Two tiles of rows are multiplied by two panels, so that each
// tile that is loaded serves twice.

#pragma once

#include "linear_float.h"
#include "tiles.h"

namespace quire { namespace QUIRE_ISA { namespace {

struct TiledFloatKernel {
    const Linear& job;
    FloatPanels<BFloat16> panels;

    static constexpr int kMostRows = kTileRows;
    static constexpr bool kEven = false;
    static constexpr int64_t kDepth = kTileBytes / 2;  // values of k in a tile
    // Values of k for which two panels stay in the first-level cache for all rows: 24 KiB, half of it.
    static constexpr int64_t kBlock = 12 * kDepth;

    int64_t depth() const { return panels.depth(); }
    // Rows of a block of k side by side; the last block is as wide as what is left of k.
    Pair* packed(int64_t row) const { return static_cast<Pair*>(job.scratch) + row * depth() / 2; }

    void pack(const Tiling& tiling, int64_t tile) const {
        const int64_t rows = tiling.size(tile), inputs = job.weight.inputs;
        Pair* out = packed(tiling.start(tile));
        for (int64_t start = 0; start < depth(); start += kDepth) {
            const int64_t left = inputs - start, wanted = depth() - start;
            const int64_t pairs = (wanted < kDepth ? wanted : kDepth) / 2;
            for (int64_t r = 0; r < rows; ++r, out += pairs) {
                const Float32* x = job.row(tiling.start(tile) + r) + start;
                if (left >= kDepth) {
                    Paired::take(out, x, kDepth);
                } else {
                    Pair values[kDepth / 2] = {};
                    Paired::take(values, x, left);
                    __builtin_memcpy(out, values, static_cast<size_t>(pairs) * sizeof(Pair));
                }
            }
        }
        written();
    }

    void multiply(const Tiling& tiling, Tiles tiles, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        const Outputs outputs(job, panel, count);
        const int64_t start = tiling.start(tiles.begin), rows = tiling.start(tiles.end) - start;
        for (int64_t p = 0; p < count; p += 2) {
            multiply_panels(sums + p * kPanel, count * kPanel, tiling, tiles, panel + p, p + 1 < count, outputs);
        }
        _tile_release();
        outputs.write(start, rows, sums);
    }

private:
    // What is multiplied together: one or two tiles of so many rows, for values of k of which a tile has `width`.
    struct Shape {
        int64_t rows, more_rows, width;

        bool operator!=(const Shape& other) const {
            return rows != other.rows || more_rows != other.more_rows || width != other.width;
        }
        // Sums 0 to 3, of activations 4 and 5 and weights 6 and 7.
        TileShapes tiles() const {
            TileShapes shapes;
            for (int which = 0; which < 2; ++which) {
                const int64_t height = which ? more_rows : rows;
                shapes.set(6 + which, width / 2, kTileBytes);
                if (height == 0) continue;
                shapes.set(2 * which, height, kTileBytes);
                shapes.set(2 * which + 1, height, kTileBytes);
                shapes.set(4 + which, height, width * 2);
            }
            return shapes;
        }
    };

    // Block after block of k, each for all tiles of rows, and the next one on its way; what does not fill a tile comes last.
    void multiply_panels(Float32* sums, int64_t stride, const Tiling& tiling, Tiles tiles, int64_t panel, bool two,
                         const Outputs& outputs) const {
        const int64_t whole = depth() / kDepth * kDepth;
        Shape shape = {};
        for (int64_t k = 0, end; k < depth(); k = end) {
            end = k == whole ? depth() : smaller_of(k + kBlock, whole);
            for (int64_t tile = tiles.begin; tile < tiles.end; tile += 2) {
                const bool more = tile + 1 < tiles.end;
                const int64_t width = k == whole ? depth() - whole : kDepth;
                const Shape wanted = {tiling.size(tile), more ? tiling.size(tile + 1) : 0, width};
                if (wanted != shape) use((shape = wanted).tiles());
                const Pair* x = packed(tiling.start(tile)) + k / 2 * shape.rows;
                const Pair* y = more ? packed(tiling.start(tile + 1)) + k / 2 * shape.more_rows : x;
                Float32* to = sums + (tiling.start(tile) - tiling.start(tiles.begin)) * stride;
                const bool first = tile == tiles.begin;
                const BFloat16 *v = panels.panel(panel) + k * kPanel, *w = panels.panel(panel + two) + k * kPanel;
                const Step step = {v, w, x, y, shape, first};
                if (end == depth()) outputs.fetch(tiling.start(tile), shape.rows + shape.more_rows);
                if (two) step.multiply<true>(to, stride, end - k, k == 0);
                else step.multiply<false>(to, stride, end - k, k == 0);
            }
        }
    }

    struct Step {
        const BFloat16 *v, *w;
        const Pair *x, *y;
        const Shape& shape;
        bool fetches;

        // sums[rows][stride] += the products of `count` values of k.
        template <bool two>
        void multiply(Float32* sums, int64_t stride, int64_t count, bool fresh) const {
            Float32* more_sums = sums + shape.rows * stride;
            const bool more = shape.more_rows != 0;
            if (fresh) {
                _tile_zero(0);
                if (two) _tile_zero(1);
                if (more) _tile_zero(2);
                if (more && two) _tile_zero(3);
            } else {
                _tile_loadd(0, sums, stride * 4);
                if (two) _tile_loadd(1, sums + kPanel, stride * 4);
                if (more) _tile_loadd(2, more_sums, stride * 4);
                if (more && two) _tile_loadd(3, more_sums + kPanel, stride * 4);
            }
            for (int64_t k = 0; k < count; k += kDepth) add<two>(k, more);
            _tile_stored(0, sums, stride * 4);
            if (two) _tile_stored(1, sums + kPanel, stride * 4);
            if (more) _tile_stored(2, more_sums, stride * 4);
            if (more && two) _tile_stored(3, more_sums + kPanel, stride * 4);
            written();
        }

        template <bool two>
        void add(int64_t k, bool more) const {
            const int64_t row_bytes = shape.width * 2;
            if (fetches) {
                for (int64_t line = 0; line < kTileRows; ++line) {
                    __builtin_prefetch(v + (k + kBlock) * kPanel + line * kDepth);
                    if (two) __builtin_prefetch(w + (k + kBlock) * kPanel + line * kDepth);
                }
            }
            _tile_loadd(6, v + k * kPanel, kTileBytes);
            _tile_loadd(4, x + k / 2 * shape.rows, row_bytes);
            _tile_dpbf16ps(0, 4, 6);
            if (two) {
                _tile_loadd(7, w + k * kPanel, kTileBytes);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (more) {
                _tile_loadd(5, y + k / 2 * shape.more_rows, row_bytes);
                _tile_dpbf16ps(2, 5, 6);
                if (two) _tile_dpbf16ps(3, 5, 7);
            }
        }
    };
};

}}}  // namespace quire::QUIRE_ISA
