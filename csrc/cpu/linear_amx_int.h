// Integer weights by AMX, where there are enough rows to fill tiles: the integers of linear_int.h, made 16 rows at a time.
//
// Two tiles of rows are multiplied by two panels, so that each tile that is loaded serves twice. The integers go through
// memory, for some chunks at a time: their sums stay in registers while vectors scale and add them, tile after tile.

#pragma once

#include "linear_int.h"
#include "tiles.h"

namespace quire { namespace QUIRE_ISA { namespace {

template <class Panels>
struct TiledIntKernel : IntKernel<Panels, true> {
    using Base = IntKernel<Panels, true>;
    using Dot = typename Base::Dot;

    static constexpr int kMostRows = kTileRows;
    static constexpr bool kEven = false;
    static constexpr int64_t kPart = Dot::kPart, kParts = Base::kParts;
    // Chunks of a panel that stay in the first-level cache for all rows: 8 KiB, and as much of a second panel.
    static constexpr int64_t kBlock = 8;
    // Chunks whose integers are in memory together: 16 KiB.
    static constexpr int64_t kTogether = 4 / kParts;

    // Weights as bytes with a sign, without their zero point.
    struct alignas(64) Bytes {
        int8_t of[kBlock][kParts][kPart * kPanel];
    };
    // What a tile of rows comes to with a panel.
    struct alignas(64) Dots {
        int32_t of[kTogether][kParts][kTileRows][kPanel];
    };

    // Products 0 to 3, of activations 4 and 5 and weights 6 and 7.
    static TileShapes shapes(int64_t rows, int64_t more_rows) {
        TileShapes shapes;
        for (int which = 0; which < 2; ++which) {
            const int64_t height = which ? more_rows : rows;
            if (height == 0) continue;
            shapes.set(2 * which, height, kTileBytes);
            shapes.set(2 * which + 1, height, kTileBytes);
            shapes.set(4 + which, height, kPart);
            shapes.set(6 + which, kPart / kQuad, kTileBytes);
        }
        shapes.set(7, kPart / kQuad, kTileBytes);
        return shapes;
    }

    void unpack(Bytes& bytes, int64_t panel, int64_t chunk, int64_t chunks) const {
        const uint8_t* from = this->packed_weights(panel, chunk);
        const __m512i zero = _mm512_set1_epi8(static_cast<char>(this->panels.zero()));
        const auto book = this->panels.book();
        int8_t* to = bytes.of[0][0];
        for (int64_t step = 0; step < chunks * Base::kChunkSteps; ++step) {
            __builtin_prefetch(from + kBytesAhead + step * kStepBytes);
            const typename Dot::Weights weights = Dot::unpack(from + step * kStepBytes, book);
            for (int quad = 0; quad < Dot::kQuads; ++quad, to += kStepBytes) {
                _mm512_store_si512(to, _mm512_sub_epi8(weights.quads[quad], zero));
            }
        }
        written();
    }

    void multiply(const Tiling& tiling, Tiles tiles, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        const Outputs outputs(this->job, panel, count);
        const int64_t start = tiling.start(tiles.begin), rows = tiling.start(tiles.end) - start;
        for (int64_t i = 0; i < rows * count; ++i) store16(sums + i * kPanel, splat16(0.0f));
        for (int64_t p = 0; p < count; p += 2) {
            multiply_panels(sums + p * kPanel, count * kPanel, tiling, tiles, panel + p, p + 1 < count, outputs);
        }
        _tile_release();
        this->finish(start, rows, panel, count, sums, outputs);
    }

    // Block after block of k, each for all tiles.
    void multiply_panels(Float32* sums, int64_t stride, const Tiling& tiling, Tiles tiles, int64_t panel, bool two,
                         const Outputs& outputs) const {
        Bytes weights[2];
        int64_t rows = 0, more_rows = 0;
        for (int64_t chunk = 0; chunk < this->chunks(); chunk += kBlock) {
            const int64_t chunks = smaller_of(this->chunks() - chunk, kBlock);
            unpack(weights[0], panel, chunk, chunks);
            if (two) unpack(weights[1], panel + 1, chunk, chunks);
            for (int64_t tile = tiles.begin; tile < tiles.end; tile += 2) {
                const int64_t wanted = tiling.size(tile), more_wanted = tile + 1 < tiles.end ? tiling.size(tile + 1) : 0;
                if (wanted != rows || more_wanted != more_rows) use(shapes(rows = wanted, more_rows = more_wanted));
                if (chunk + chunks == this->chunks()) outputs.fetch(tiling.start(tile), rows + more_rows);
                Float32* to = sums + (tiling.start(tile) - tiling.start(tiles.begin)) * stride;
                multiply_tiles(to, stride, tiling, tile, more_rows != 0, panel, two, chunk, chunks, weights);
            }
        }
    }

    // A block of k for one or two tiles of rows, and one or two panels.
    void multiply_tiles(Float32* sums, int64_t stride, const Tiling& tiling, int64_t tile, bool more, int64_t panel, bool two,
                        int64_t chunk, int64_t chunks, const Bytes* weights) const {
        Dots dots[2][2];
        const int64_t rows[2] = {tiling.size(tile), tiling.size(tile + more)};
        PackedRows x[2] = {this->packed(tiling, tile, chunk), this->packed(tiling, tile + more, chunk)};
        for (int64_t first = 0; first < chunks; first += kTogether) {
            const int64_t count = smaller_of(chunks - first, kTogether);
            for (int64_t i = 0; i < count; ++i) {
                for (int64_t part = 0; part < kParts; ++part) {
                    const int64_t at = part * kPart / kQuad;
                    dot(dots, i, part, x[0].words + i * rows[0] * Base::kChunkWords + at, x[1].words + i * rows[1] * Base::kChunkWords + at,
                        weights[0].of[first + i][part], weights[1].of[first + i][part], more, two);
                }
            }
            written();
            for (int64_t t = 0; t <= more; ++t) {
                const PackedRows own = x[t];
                x[t].words += count * rows[t] * Base::kChunkWords;
                x[t].scales += count * rows[t], x[t].minus += count * kParts * rows[t];
                const int32_t* next = first + count < chunks ? x[t].words : this->packed(tiling, smaller_of(tile + 2 + t, tiling.tiles - 1), chunk).words;
                for (int64_t p = 0; p <= two; ++p) {
                    const auto groups = this->panels.groups(panel + p, (chunk + first) * kParts);
                    Float32* to = sums + t * rows[0] * stride + p * kPanel;
                    with_rows<kTogether>(count, [&](auto chunks) {
                        constexpr int C = decltype(chunks)::value;
                        if (rows[t] == kTileRows) add<C, kTileRows>(to, stride, own, dots[t][p], groups, kTileRows, next + p * 16);
                        else add<C, 0>(to, stride, own, dots[t][p], groups, rows[t], next + p * 16);
                    });
                }
            }
        }
    }

    // All products are begun before the first is stored, which waits for it.
    static void dot(Dots (&dots)[2][2], int64_t chunk, int64_t part, const int32_t* x, const int32_t* y, const int8_t* v,
                    const int8_t* w, bool more, bool two) {
        _tile_loadd(6, v, kTileBytes);
        _tile_loadd(4, x, kTileBytes);
        if (two) _tile_loadd(7, w, kTileBytes);
        if (more) _tile_loadd(5, y, kTileBytes);
        _tile_zero(0);
        _tile_dpbssd(0, 4, 6);
        if (two) {
            _tile_zero(1);
            _tile_dpbssd(1, 4, 7);
        }
        if (more) {
            _tile_zero(2);
            _tile_dpbssd(2, 5, 6);
        }
        if (more && two) {
            _tile_zero(3);
            _tile_dpbssd(3, 5, 7);
        }
        _tile_stored(0, dots[0][0].of[chunk][part], kTileBytes);
        if (two) _tile_stored(1, dots[0][1].of[chunk][part], kTileBytes);
        if (more) _tile_stored(2, dots[1][0].of[chunk][part], kTileBytes);
        if (more && two) _tile_stored(3, dots[1][1].of[chunk][part], kTileBytes);
    }

    // sums[rows][stride] += the integers of C chunks, scaled as multiply_chunks does it; R is `rows` where that is known. Meanwhile
    // every other line of the activations at `next` is fetched.
    template <int C, int R, class Groups>
    static void add(Float32* sums, int64_t stride, PackedRows x, const Dots& dots, const Groups& groups, int64_t rows,
                    const int32_t* next) {
        if constexpr (R) rows = R;
        decltype(groups.at(0, 0)) group[C * kParts];
#pragma GCC unroll 4
        for (int64_t part = 0; part < C * kParts; ++part) group[part] = groups.at(0, part);
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t line = 0; line < C; line += 2) __builtin_prefetch(next + (r * C + line) * 16);
            Lanes16 total = load16(sums + r * stride);
#pragma GCC unroll 4
            for (int64_t chunk = 0; chunk < C; ++chunk) {
                Lanes16 product = {};
#pragma GCC unroll 4
                for (int64_t part = 0; part < kParts; ++part) {
                    const Ints16 dot = {_mm512_load_si512(dots.of[chunk][part][r])};
                    product = group[chunk * kParts + part].add(product, dot, x.minus[(chunk * kParts + part) * rows + r]);
                }
                total = fma(product, splat16(x.scales[chunk * rows + r].value), total);
            }
            store16(sums + r * stride, total);
        }
    }
};

}}}  // namespace quire::QUIRE_ISA
