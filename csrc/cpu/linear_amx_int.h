// Integer weights by AMX, where there are enough rows to fill tiles: the integers of linear_int.h, made 16 rows at a time.

#pragma once

#include "linear_int.h"
#include "tiles.h"

namespace quire { namespace QUIRE_ISA { namespace {

template <class Panels>
struct TiledIntKernel : IntKernel<Panels, true> {
    using Base = IntKernel<Panels, true>;
    using Dot = typename Base::Dot;

    static constexpr int kMostRows = kTileRows;

    // Rows are cut into tiles of two sizes at most, which have registers of their own beside the weights'.
    static TileShapes shapes(const Tiling& tiling) {
        TileShapes shapes;
        for (int which = 0; which < 2; ++which) {
            const int64_t rows = tiling.size(which * (tiling.tiles - 1));
            shapes.set(2 * which, rows, kTileBytes);
            shapes.set(2 * which + 1, rows, Dot::kPart);
        }
        shapes.set(4, Dot::kPart / kQuad, kTileBytes);
        return shapes;
    }

    // sums [rows][16] = x . w over a part of k.
    static void dot(int32_t* sums, const int32_t* x, const uint8_t* weights, bool last_size) {
        _tile_loadd(4, weights, kTileBytes);
        if (last_size) {
            _tile_zero(2);
            _tile_loadd(3, x, kTileBytes);
            _tile_dpbsud(2, 3, 4);
            _tile_stored(2, sums, kTileBytes);
        } else {
            _tile_zero(0);
            _tile_loadd(1, x, kTileBytes);
            _tile_dpbsud(0, 1, 4);
            _tile_stored(0, sums, kTileBytes);
        }
    }

    // The weights of a chunk as bytes.
    const uint8_t* unpacked(uint8_t* bytes, const uint8_t* weights) const {
        if constexpr (Dot::kQuads == 1) return weights;
        for (int64_t step = 0; step < Base::kChunkSteps; ++step) {
            const typename Dot::Weights unpacked = Dot::unpack(weights + step * kStepBytes, this->panels.book());
            __builtin_memcpy(bytes + step * sizeof unpacked, &unpacked, sizeof unpacked);
        }
        written();
        return bytes;
    }

    void multiply(const Tiling& tiling, Tiles tiles, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        const int64_t start = tiling.start(tiles.begin), rows = tiling.start(tiles.end) - start;
        for (int64_t i = 0; i < rows * count; ++i) store16(sums + i * kPanel, splat16(0.0f));
        use(shapes(tiling));
        for (int64_t p = 0; p < count; ++p) multiply_panel(sums + p * kPanel, count * kPanel, tiling, tiles, panel + p);
        _tile_release();
        this->finish(start, rows, panel, count, sums);
    }

    void multiply_panel(Float32* sums, int64_t stride, const Tiling& tiling, Tiles tiles, int64_t panel) const {
        alignas(64) uint8_t bytes[kChunk * kPanel];
        const int64_t first_row = tiling.start(tiles.begin);
        for (int64_t chunk = 0; chunk < this->chunks(); ++chunk) {
            const uint8_t* from = this->packed_weights(panel, chunk);
            for (int64_t line = 0; line < Base::kChunkSteps; ++line) __builtin_prefetch(from + kBytesAhead + line * kStepBytes);
            const uint8_t* weights = unpacked(bytes, from);
            const auto groups = this->panels.groups(panel, chunk * Base::kParts);
            for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
                add_chunk(sums + (tiling.start(tile) - first_row) * stride, stride, this->packed(tiling, tile, chunk), weights, groups,
                          tiling.size(tile), tiling.size(tile) != tiling.size(0));
            }
        }
    }

    // As multiply_chunks does, for a chunk.
    template <class Groups>
    static void add_chunk(Float32* sums, int64_t stride, PackedRows x, const uint8_t* weights, const Groups& groups,
                          int64_t rows, bool last_size) {
        Lanes16 products[kTileRows] = {};
        for (int64_t part = 0; part < Base::kParts; ++part) {
            alignas(64) int32_t dots[kTileRows * kPanel];
            dot(dots, x.words + part * Dot::kPart / kQuad, weights + part * Dot::kPart * kPanel, last_size);
            const auto group = groups.at(0, part);
            for (int64_t r = 0; r < rows; ++r) {
                const __m512i start = _mm512_set1_epi32(x.starts[part * rows + r]);
                const Ints16 total = {_mm512_add_epi32(_mm512_load_si512(dots + r * kPanel), start)};
                products[r] = group.add(products[r], total, x.minus[part * rows + r]);
            }
        }
        for (int64_t r = 0; r < rows; ++r) {
            store16(sums + r * stride, fma(products[r], splat16(x.scales[r].value), load16(sums + r * stride)));
        }
    }
};

}}}  // namespace quire::QUIRE_ISA
