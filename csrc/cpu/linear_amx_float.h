// bfloat16 weights by AMX, activations rounded to bfloat16.
//
// Of 32 k the first ones of all pairs are added in turn, and so are the second ones; then both sums, and what they are added
// to, are added. No other instruction rounds so: a single row is multiplied by tiles as well.

#pragma once

#include "linear_float.h"
#include "tiles.h"

namespace quire { namespace QUIRE_ISA { namespace {

struct TiledFloatKernel {
    const Linear& job;
    FloatPanels<BFloat16> panels;

    static constexpr int kMostRows = kTileRows;
    static constexpr int64_t kDepth = kTileBytes / 2;  // values of k in a tile

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
                Pair values[kDepth / 2] = {};
                const Float32* x = job.row(tiling.start(tile) + r) + start;
                Paired::take(values, x, left < kDepth ? left : kDepth);
                __builtin_memcpy(out, values, static_cast<size_t>(pairs) * sizeof(Pair));
            }
        }
    }

    void multiply(const Tiling& tiling, Tiles tiles, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        const int64_t stride = count * kPanel, start = tiling.start(tiles.begin), rows = tiling.start(tiles.end) - start;
        written();
        for (int64_t tile = tiles.begin; tile < tiles.end; tile += 2) {
            const bool two = tile + 1 < tiles.end;
            use(shapes(tiling.size(tile), two ? tiling.size(tile + 1) : 0));
            for (int64_t p = 0; p < count; ++p) {
                Float32* to = sums + (tiling.start(tile) - start) * stride + p * kPanel;
                if (two) multiply_two(to, to + tiling.size(tile) * stride, stride, tiling, tile, panel + p);
                else multiply_one(to, stride, tiling, tile, panel + p);
            }
        }
        _tile_release();
        const Outputs outputs(job, panel, count);
        for (int64_t row = 0; row < rows; ++row) outputs.write(start + row, sums + row * stride);
    }

private:
    // Sums 0 and 1; activations 2 and 3; weights 4; and for what is left of k activations 5 and 6, weights 7.
    TileShapes shapes(int64_t rows, int64_t more_rows) const {
        const int64_t left = depth() % kDepth;
        TileShapes shapes;
        for (int which = 0; which < 2; ++which) {
            const int64_t height = which ? more_rows : rows;
            if (height == 0) continue;
            shapes.set(which, height, kTileBytes);
            shapes.set(2 + which, height, kTileBytes);
            if (left) shapes.set(5 + which, height, left * 2);
        }
        shapes.set(4, kDepth / 2, kTileBytes);
        if (left) shapes.set(7, left / 2, kTileBytes);
        return shapes;
    }

    static void fetch(const BFloat16* weights) {
        for (int64_t line = 0; line < kDepth / 2; ++line) __builtin_prefetch(weights + kAhead * kPanel + line * kDepth);
    }

    void multiply_one(Float32* sums, int64_t stride, const Tiling& tiling, int64_t tile, int64_t panel) const {
        const BFloat16* weights = panels.panel(panel);
        const Pair* x = packed(tiling.start(tile));
        const int64_t rows = tiling.size(tile), whole = depth() / kDepth, left = depth() % kDepth;
        _tile_zero(0);
        for (int64_t block = 0; block < whole; ++block) {
            const BFloat16* w = weights + block * kDepth * kPanel;
            fetch(w);
            _tile_loadd(2, x + block * rows * kDepth / 2, kTileBytes);
            _tile_loadd(4, w, kTileBytes);
            _tile_dpbf16ps(0, 2, 4);
        }
        if (left) {
            _tile_loadd(5, x + whole * rows * kDepth / 2, left * 2);
            _tile_loadd(7, weights + whole * kDepth * kPanel, kTileBytes);
            _tile_dpbf16ps(0, 5, 7);
        }
        _tile_stored(0, sums, stride * 4);
    }

    void multiply_two(Float32* sums, Float32* more, int64_t stride, const Tiling& tiling, int64_t tile, int64_t panel) const {
        const BFloat16* weights = panels.panel(panel);
        const Pair *x = packed(tiling.start(tile)), *y = packed(tiling.start(tile + 1));
        const int64_t rows = tiling.size(tile), more_rows = tiling.size(tile + 1);
        const int64_t whole = depth() / kDepth, left = depth() % kDepth;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t block = 0; block < whole; ++block) {
            const BFloat16* w = weights + block * kDepth * kPanel;
            fetch(w);
            _tile_loadd(4, w, kTileBytes);
            _tile_loadd(2, x + block * rows * kDepth / 2, kTileBytes);
            _tile_dpbf16ps(0, 2, 4);
            _tile_loadd(3, y + block * more_rows * kDepth / 2, kTileBytes);
            _tile_dpbf16ps(1, 3, 4);
        }
        if (left) {
            _tile_loadd(7, weights + whole * kDepth * kPanel, kTileBytes);
            _tile_loadd(5, x + whole * rows * kDepth / 2, left * 2);
            _tile_dpbf16ps(0, 5, 7);
            _tile_loadd(6, y + whole * more_rows * kDepth / 2, left * 2);
            _tile_dpbf16ps(1, 6, 7);
        }
        _tile_stored(0, sums, stride * 4);
        _tile_stored(1, more, stride * 4);
    }
};

}}}  // namespace quire::QUIRE_ISA
