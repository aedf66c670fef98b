// SPDX-License-Identifier: Apache-2.0
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
    static constexpr int64_t kPart = Dot::kPart, kParts = Base::kParts, kSpans = Base::kSpans;
    // Chunks of a panel that stay in the first-level cache for all rows: 8 KiB, and as much of a second panel.
    static constexpr int64_t kBlock = 8;
    // Chunks whose integers are in memory together: 16 KiB.
    static constexpr int64_t kTogether = 4 / kParts;

    // Weights as bytes with a sign, without their zero point.
    struct alignas(64) Bytes {
        int8_t of[kBlock][kParts][kPart * kPanel];
    };
    template <int P, int64_t most_chunks>
    using KeptSums = typename Base::template KeptSums<P, most_chunks>;

    // What a tile of rows comes to with a panel.
    struct alignas(64) Dots {
        int32_t of[kTogether][kParts][kTileRows][kPanel];
    };

    // One or two tiles of rows, from some chunk on, by one or two panels.
    struct Square {
        PackedRows x[2];
        int64_t rows[2];         // the second is 0 where there is one tile
        const int32_t* after[2];  // activations that are wanted once these chunks are done
        const Bytes* weights;
        const KeptSums<1, kBlock>* come_to;  // of each panel
        bool two_panels;
        Float32* sums;
        int64_t stride;

        bool two_tiles() const { return rows[1] != 0; }
        const int32_t* words(int tile, int64_t chunk, int64_t part) const {
            return x[tile].words + chunk * rows[tile] * Base::kChunkWords + part * kPart / kQuad;
        }
        void skip(int64_t chunks) {
            for (int tile = 0; tile < 2; ++tile) {
                x[tile].words += chunks * rows[tile] * Base::kChunkWords;
                x[tile].scales += chunks * kSpans * rows[tile], x[tile].points += chunks * kSpans * rows[tile];
                x[tile].minus += chunks * kParts * rows[tile];
            }
        }
    };

    // Products 0 to 3, of activations 4 and 5 and weights 6 and 7.
    static TileShapes shapes(const int64_t (&rows)[2]) {
        TileShapes shapes;
        for (int which = 0; which < 2; ++which) {
            shapes.set(6 + which, kPart / kQuad, kTileBytes);
            if (rows[which] == 0) continue;
            shapes.set(2 * which, rows[which], kTileBytes);
            shapes.set(2 * which + 1, rows[which], kTileBytes);
            shapes.set(4 + which, rows[which], kPart);
        }
        return shapes;
    }

    void unpack(Bytes& bytes, int64_t panel, int64_t chunk, int64_t chunks) const {
        const uint8_t* from = this->packed_weights(panel, chunk);
        const __m512i zero = _mm512_set1_epi8(static_cast<char>(this->panels.zero()));
        const auto book = this->panels.book();
        int8_t* to = bytes.of[0][0];
        for (int64_t step = 0; step < chunks * Base::kChunkSteps; ++step) {
            for (int64_t line = 0; line < Dot::kBytes; line += kTileBytes) {
                __builtin_prefetch(from + kBytesAhead + step * Dot::kBytes + line);
            }
            const typename Dot::Weights weights = Dot::unpack(from + step * Dot::kBytes, book);
            for (int quad = 0; quad < Dot::kQuads; ++quad, to += kStepBytes) {
                _mm512_store_si512(to, _mm512_sub_epi8(weights.quads[quad], zero));
            }
        }
        written();
    }

    KeptSums<1, kBlock> sums_of(int64_t panel, int64_t chunk, int64_t chunks) const {
        const typename Base::RowOfOnes ones(this->panels.zero());
        return this->template part_sums<1, kBlock>(panel, chunk, chunks, ones, this->packed_weights(panel, chunk));
    }

    void multiply(const Tiling& tiling, Tiles tiles, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        const Outputs outputs = this->outputs_of(panel, count);
        const int64_t start = tiling.start(tiles.begin), rows = tiling.start(tiles.end) - start;
        for (int64_t i = 0; i < rows * count; ++i) store16(sums + i * kPanel, splat16(0.0f));
        for (int64_t p = 0; p < count; p += 2) {
            multiply_panels(sums + p * kPanel, count * kPanel, tiling, tiles, panel + p, p + 1 < count, outputs);
        }
        _tile_release();
        outputs.write(start, rows, sums);
    }

    // Block after block of k, each for all tiles.
    void multiply_panels(Float32* sums, int64_t stride, const Tiling& tiling, Tiles tiles, int64_t panel, bool two,
                         const Outputs& outputs) const {
        Bytes weights[2];
        int64_t rows[2] = {};
        for (int64_t chunk = 0; chunk < this->num_chunks; chunk += kBlock) {
            const int64_t chunks = smaller_of(this->num_chunks - chunk, kBlock);
            unpack(weights[0], panel, chunk, chunks);
            if (two) unpack(weights[1], panel + 1, chunk, chunks);
            const KeptSums<1, kBlock> come_to[] = {sums_of(panel, chunk, chunks), sums_of(panel + two, chunk, chunks)};
            for (int64_t tile = tiles.begin; tile < tiles.end; tile += 2) {
                Float32* to = sums + (tiling.start(tile) - tiling.start(tiles.begin)) * stride;
                const Square square = square_of(tiling, tiles, tile, chunk, weights, come_to, two, to, stride);
                if (square.rows[0] != rows[0] || square.rows[1] != rows[1]) {
                    rows[0] = square.rows[0], rows[1] = square.rows[1];
                    use(shapes(rows));
                }
                if (chunk + chunks == this->num_chunks) outputs.fetch(tiling.start(tile), rows[0] + rows[1]);
                multiply_square(square, panel, chunk, chunks);
            }
        }
    }

    Square square_of(const Tiling& tiling, Tiles tiles, int64_t tile, int64_t chunk, const Bytes* weights,
                     const KeptSums<1, kBlock>* come_to, bool two, Float32* sums, int64_t stride) const {
        Square square = {{}, {}, {}, weights, come_to, two, sums, stride};
        for (int64_t which = 0; which < 2; ++which) {
            const int64_t own = smaller_of(tile + which, tiles.end - 1), next = smaller_of(tile + 2 + which, tiles.end - 1);
            square.x[which] = this->packed(tiling, own, chunk);
            square.rows[which] = own == tile + which ? tiling.size(own) : 0;
            square.after[which] = this->packed(tiling, next, chunk).words;
        }
        return square;
    }

    void multiply_square(Square square, int64_t panel, int64_t chunk, int64_t chunks) const {
        Dots dots[2][2];
        for (int64_t first = 0; first < chunks; first += kTogether) {
            const int64_t count = smaller_of(chunks - first, kTogether);
            for (int64_t i = 0; i < count; ++i) {
                for (int64_t part = 0; part < kParts; ++part) dot(dots, square, i, first + i, part);
            }
            written();
            const Square own = square;
            square.skip(count);
            for (int tile = 0; tile <= own.two_tiles(); ++tile) {
                const int32_t* next = first + count < chunks ? square.x[tile].words : own.after[tile];
                for (int p = 0; p <= own.two_panels; ++p) {
                    const auto groups = this->template groups<1, kTogether>(panel + p, chunk + first, count);
                    Float32* to = own.sums + tile * own.rows[0] * own.stride + p * kPanel;
                    const int64_t rows = own.rows[tile];
                    with_rows<kTogether>(count, [&](auto together) {
                        constexpr int C = decltype(together)::value;
                        const auto put = [&](auto known) {
                            constexpr int R = decltype(known)::value;
                            add<C, R>(to, own, tile, dots[tile][p], groups, own.come_to[p], first, next + p * kPanel);
                        };
                        if (rows == kTileRows) put(std::integral_constant<int, kTileRows>{});
                        else put(std::integral_constant<int, 0>{});
                    });
                }
            }
        }
    }

    // All products are begun before the first is stored, which waits for it; `i` is the chunk's place among those together.
    static void dot(Dots (&dots)[2][2], const Square& square, int64_t i, int64_t chunk, int64_t part) {
        const bool more = square.two_tiles(), two = square.two_panels;
        _tile_loadd(6, square.weights[0].of[chunk][part], kTileBytes);
        _tile_loadd(4, square.words(0, i, part), kTileBytes);
        if (two) _tile_loadd(7, square.weights[1].of[chunk][part], kTileBytes);
        if (more) _tile_loadd(5, square.words(1, i, part), kTileBytes);
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
        _tile_stored(0, dots[0][0].of[i][part], kTileBytes);
        if (two) _tile_stored(1, dots[0][1].of[i][part], kTileBytes);
        if (more) _tile_stored(2, dots[1][0].of[i][part], kTileBytes);
        if (more && two) _tile_stored(3, dots[1][1].of[i][part], kTileBytes);
    }

    // sums[rows][stride] += the integers of C chunks for a tile, scaled as multiply_chunks does it; R is its rows where that is
    // known. Meanwhile every other line of the activations at `next` is fetched.
    template <int C, int R, class Groups>
    static void add(Float32* sums, const Square& square, int tile, const Dots& dots, const Groups& groups,
                    const KeptSums<1, kBlock>& come_to, int64_t first, const int32_t* next) {
        const int64_t rows = R ? R : square.rows[tile], stride = square.stride;
        const PackedRows& x = square.x[tile];
        decltype(groups.at(0, 0)) group[C * kParts];
#pragma GCC unroll 4
        for (int64_t part = 0; part < C * kParts; ++part) group[part] = groups.at(0, part);
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t line = 0; line < C; line += 2) __builtin_prefetch(next + (r * C + line) * kPanel);
            Lanes16 total = load16(sums + r * stride);
#pragma GCC unroll 4
            for (int64_t span = 0; span < C * kSpans; ++span) {
                Lanes16 product = {};
#pragma GCC unroll 4
                for (int64_t i = 0; i < kParts / kSpans; ++i) {
                    const int64_t at = span * (kParts / kSpans) + i;
                    Lanes16 dot = to_floats(Ints16{_mm512_load_si512(dots.of[at / kParts][at % kParts][r])});
                    if constexpr (Base::kNeedsSums) {
                        const Lanes16 weights = come_to.at(0, first * kParts + at);
                        dot = fma(weights, splat16(x.points[span * rows + r].value), dot);
                    }
                    product = group[at].add(product, dot, x.minus[at * rows + r]);
                }
                total = fma(product, splat16(x.scales[span * rows + r].value), total);
            }
            store16(sums + r * stride, total);
        }
    }
};

}}}  // namespace quire::QUIRE_ISA
