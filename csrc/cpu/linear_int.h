// SPDX-License-Identifier: Apache-2.0
// Linear on integer weights, in the fast mode: activations are rounded to 8 bits, with a scale per row and chunk of k, or half of
// a chunk where weights of eight bits have scales per group.
//
// A part of a chunk is summed as exact integers, from which the weights' zero point is taken out by the sum of the
// activations; parts and spans, which lie at fixed k, are added in float32 in order. Activations that weights of eight bits
// multiply have zero points. On instruction sets that multiply integers of 16 bits the words hold them; elsewhere the sum of a
// part's weights, the product of a row of ones, is multiplied by them. Either is exact.

#pragma once

#include "linear_float.h"
#include "round_chunk.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Bytes ahead of the ones in use that weights are fetched. One row reads panel after panel, a single stream that runs on
// into the next panel: no panel of int4 is long enough to be fetched while another is read beside it.
constexpr int64_t kBytesAhead = 4096;

// How near the fetched weights are kept: a whole block of them would push the one in use out of the first-level cache.
enum Fetch : int { kLater = 2, kSoon = 3 };

// Where what weights come to, which zero points of activations are multiplied by, is from: none is asked for, it is found with
// the products, or it was before.
enum class CodeSums { kNone, kAlong, kBefore };

// A tile of R packed rows from some chunk on: words [quad][R] of four values each; per span, of which a chunk has one or two, the
// scale and the zero point of each row, [span][R]; and per part of a chunk what its sum starts with, and the activations' own sum, negated, which minimums are
// multiplied by.
struct PackedRows {
    const int32_t* words;
    const Float32* scales;
    const Float32* points;
    const int32_t* starts;
    const Float32* minus;
};

// The scales of a matrix, and its zero points or minimums, for groups of 2^log_parts parts.
struct GroupStreams {
    Stream scales, zeros;
    int64_t scales_bytes, zeros_bytes;  // of a panel
    int log_parts;
    int32_t taken_zero;

    GroupStreams(const Weight& weight, int64_t part_size)
        : scales(weight.scale_stream()), zeros(weight.zero_stream()), taken_zero(zero_of(weight.packing)) {
        const int64_t count = weight.groups(), size = weight.packing.group;
        scales_bytes = scales.panel_bytes(count), zeros_bytes = zeros.panel_bytes(count);
        log_parts = size ? __builtin_ctzll(static_cast<uint64_t>(size / part_size)) : 62;
    }
};

// What the weights of some parts of P panels, from `first_part` on, are besides integers: nothing yet, where there is a scale
// per output.
struct NoGroups {
    NoGroups() = default;
    template <class Panels>
    NoGroups(const Panels&, int64_t, int64_t, int64_t) {}
    NoGroups at(int64_t, int64_t) const { return {}; }
    Lanes16 add(Lanes16, Lanes16 sum, Float32) const { return sum; }
};

// Or a scale, and perhaps a minimum, per group: as floats, made once for all rows. A zero point is a minimum, too: its distance
// from the one that is taken out with the activations, times the scale. Where there is neither, a minimum that is added all the
// same is 0.
template <int P, int64_t most_parts, bool has_shifts>
class Groups {
public:
    template <class Panels>
    Groups(const Panels& panels, int64_t panel, int64_t first_part, int64_t parts) : log_parts_(panels.streams.log_parts) {
        const GroupStreams& streams = panels.streams;
        const int64_t first = first_part >> log_parts_, count = ((first_part + parts - 1) >> log_parts_) - first + 1;
        skipped_ = first_part - (first << log_parts_);
        for (int64_t p = 0; p < P; ++p) {
            streams.scales.after((panel + p) * streams.scales_bytes).widen(scales_[p], first, count);
            if (!has_shifts) continue;
            const Stream zeros = streams.zeros.after((panel + p) * streams.zeros_bytes);
            zeros.widen_minimums(minimums_[p], scales_[p], first, count, streams.taken_zero);
        }
    }

    struct Scaled {
        Lanes16 scale;

        Lanes16 add(Lanes16 before, Lanes16 sum, Float32) const { return fma(sum, scale, before); }
    };
    struct Shifted {
        Lanes16 scale, minimum;

        Lanes16 add(Lanes16 before, Lanes16 sum, Float32 minus) const {
            return fma(minimum, splat16(minus.value), fma(sum, scale, before));
        }
    };

    auto at(int64_t p, int64_t part) const {
        const int64_t lane = ((skipped_ + part) >> log_parts_) * kPanel;
        if constexpr (has_shifts) return Shifted{load16(scales_[p] + lane), load16(minimums_[p] + lane)};
        else return Scaled{load16(scales_[p] + lane)};
    }

private:
    int log_parts_;
    int64_t skipped_;
    alignas(64) Float32 scales_[P][most_parts * kPanel];
    alignas(64) Float32 minimums_[has_shifts ? P : 1][has_shifts ? most_parts * kPanel : 1];
};

// A step of packed weights; where registers hold no more than a quad or two, those are unpacked one by one.
template <class Dot>
inline auto weights_of(const uint8_t* panel, int64_t step, const typename Dot::Book& book) {
    const uint8_t* at = panel + step * Dot::kBytes;
    if constexpr (kWidePanels == 1 && Dot::kQuads > 2) return PackedStep{at};
    else return Dot::unpack(at, book);
}
template <class Dot>
inline const typename Dot::Weights& weights_of(const typename Dot::Weights* panel, int64_t step, const typename Dot::Book&) {
    return panel[step];
}

// A part of a row of ones.
template <class Dot>
struct Ones {
    int32_t words[Dot::kPart / kQuad], start;

    explicit Ones(int32_t zero) {
        int8_t values[Dot::kPart];
        __builtin_memset(values, 1, sizeof values);
        __builtin_memcpy(words, values, sizeof values);
        start = Dot::start_word(values, Dot::kPart, -zero);
    }
};

// Where nothing is multiplied by what weights come to.
struct NoOnes {
    explicit NoOnes(int32_t) {}
};

// Adds a quad, or two, of weights times those of a row, which lie `rows` quads apart.
template <class Dot, int rows, class Quads>
inline __attribute__((always_inline)) void add_quads(typename Dot::Sum& sum, const Quads& weights, const int32_t* x) {
    if constexpr (Dot::kTogether == 1) Dot::add(sum, weights, x);
    else Dot::add(sum, weights, x, x + rows * Dot::kWords);
}

// acc = starts + x . w over a part of k, whose weights begin at `first`, for P panels `panel_stride` elements apart, and along
// with it, where that is asked for, what the weights come to. Where registers hold the weights of all panels, each activation is
// read once. The packed weights at `next` are fetched meanwhile.
template <int R, int P, Fetch fetch, CodeSums code_sums, class Dot, class W, class RowOfOnes>
inline __attribute__((always_inline)) void multiply_part(typename Dot::Sum (&acc)[R][P], typename Dot::Sum (&all)[P],
                                                         const int32_t* starts, const int32_t* words, const W* w,
                                                         int64_t panel_stride, int64_t first, const typename Dot::Book& book,
                                                         const RowOfOnes& ones, const uint8_t* next) {
    for (int p = 0; p < P; ++p) {
        for (int r = 0; r < R; ++r) acc[r][p] = Dot::start(starts[r]);
        if constexpr (code_sums == CodeSums::kAlong) all[p] = Dot::start(ones.start);
    }
#pragma GCC unroll 8
    for (int64_t step = 0; step < Dot::kPart / (kQuad * Dot::kQuads); ++step) {
        const auto fetched = [&](int p) -> decltype(auto) {
            for (int64_t line = 0; line < Dot::kBytes; line += 64) {
                __builtin_prefetch(next + p * panel_stride + (first + step) * Dot::kBytes + line, 0, fetch);
            }
            return weights_of<Dot>(w + p * panel_stride, first + step, book);
        };
        const auto count = [&]([[maybe_unused]] int p, [[maybe_unused]] const auto& taken) {
            if constexpr (code_sums == CodeSums::kAlong) add_quads<Dot, 1>(all[p], taken, ones.words);
        };
        if constexpr (kWidePanels > 1) {
            typename Dot::Weights weights[P];
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) weights[p] = fetched(p);
#pragma GCC unroll 4
            for (int quad = 0; quad < Dot::kQuads; ++quad) {
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
                    for (int p = 0; p < P; ++p) {
                        Dot::add(acc[r][p], Dot::quad(weights[p], quad), words + (quad * R + r) * Dot::kWords);
                    }
                }
                for (int p = 0; p < P; ++p) count(p, Dot::quad(weights[p], quad));
            }
        } else {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                const auto& weights = fetched(p);
#pragma GCC unroll 4
                for (int quad = 0; quad < Dot::kQuads; quad += Dot::kTogether) {
                    const auto& taken = [&]() -> decltype(auto) {
                        if constexpr (std::is_same_v<W, uint8_t>) return Dot::quad(weights, quad);
                        else return Dot::kept(weights, quad);
                    }();
#pragma GCC unroll 12
                    for (int r = 0; r < R; ++r) add_quads<Dot, R>(acc[r][p], taken, words + (quad * R + r) * Dot::kWords);
                    count(p, taken);
                }
            }
        }
        words += Dot::kQuads * R * Dot::kWords;
    }
}

// What the weights of some parts of P panels come to, as floats.
template <int P, int64_t most_parts>
class PartSums {
public:
    // Of those that begin at w; the packed weights at `next` are fetched meanwhile.
    template <class Dot>
    void find(const uint8_t* w, int64_t panel_stride, int64_t parts, const typename Dot::Book& book, const Ones<Dot>& ones,
              const uint8_t* next) {
        constexpr int64_t kSteps = Dot::kPart / (kQuad * Dot::kQuads);
        for (int64_t part = 0; part < parts; ++part) {
            typename Dot::Sum sums[1][P], unused[P];
            multiply_part<1, P, kLater, CodeSums::kNone, Dot>(sums, unused, &ones.start, ones.words, w, panel_stride,
                                                             part * kSteps, book, ones, next);
            for (int p = 0; p < P; ++p) store16(of_[p] + part * kPanel, to_floats(Dot::total(sums[0][p])));
        }
    }
    Lanes16 at(int64_t p, int64_t part) const { return load16(of_[p] + part * kPanel); }

private:
    alignas(64) Float32 of_[P][most_parts * kPanel];
};

// Where they are not found before.
struct NoPartSums {};

// sums[R][stride] += scales * ((x + points) . (w - zero)), span after span, for P panels `panel_stride` elements apart. The
// packed weights at `next` are fetched meanwhile.
template <int R, int P, Fetch fetch, CodeSums code_sums, int spans, class Dot, class W, class Groups, class PartSums, class RowOfOnes>
inline void multiply_chunks(Float32* sums, int64_t stride, PackedRows x, const W* w, int64_t panel_stride, const Groups& groups,
                            const PartSums& part_sums, const RowOfOnes& ones, const typename Dot::Book& book, int64_t chunks,
                            const uint8_t* next) {
    constexpr int kParts = kChunk / Dot::kPart / spans, kSteps = Dot::kPart / (kQuad * Dot::kQuads);
    constexpr bool kKeeps = R * P <= kKeptSums;
    Lanes16 kept[R][P];
    for (int r = 0; kKeeps && r < R; ++r) {
        for (int p = 0; p < P; ++p) kept[r][p] = load16(sums + r * stride + p * kPanel);
    }
    for (int64_t span = 0; span < chunks * spans; ++span) {
        Lanes16 products[R][P] = {};
#pragma GCC unroll 2
        for (int i = 0; i < kParts; ++i) {
            const int64_t part = span * kParts + i;
            typename Dot::Sum acc[R][P], all[P];
            multiply_part<R, P, fetch, code_sums, Dot>(acc, all, x.starts, x.words, w, panel_stride, part * kSteps, book, ones,
                                                       next);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                const auto group = groups.at(p, part);
                Lanes16 come_to = {};
                if constexpr (code_sums == CodeSums::kAlong) come_to = to_floats(Dot::total(all[p]));
                if constexpr (code_sums == CodeSums::kBefore) come_to = part_sums.at(p, part);
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    Lanes16 sum = to_floats(Dot::total(acc[r][p]));
                    if constexpr (code_sums != CodeSums::kNone) sum = fma(come_to, splat16(x.points[r].value), sum);
                    products[r][p] = group.add(products[r][p], sum, x.minus[r]);
                }
            }
            x.words += kSteps * Dot::kQuads * R * Dot::kWords, x.starts += R, x.minus += R;
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                Float32* sum = sums + r * stride + p * kPanel;
                const Lanes16 scale = splat16(x.scales[r].value);
                if constexpr (kKeeps) kept[r][p] = fma(products[r][p], scale, kept[r][p]);
                else store16(sum, fma(products[r][p], scale, load16(sum)));
            }
        }
        x.scales += R, x.points += R;
    }
    for (int r = 0; kKeeps && r < R; ++r) {
        for (int p = 0; p < P; ++p) store16(sums + r * stride + p * kPanel, kept[r][p]);
    }
}

// Panels of codes, whose integers are multiplied as they are.
template <class DotType>
struct CodePanels {
    const Weight& weight;
    int64_t bytes = weight.panel_bytes();

    using Dot = DotType;

    int32_t zero() const { return zero_of(weight.packing); }
    const uint8_t* panel(int64_t index) const { return static_cast<const uint8_t*>(weight.data) + index * bytes; }
    typename Dot::Book book() const { return typename Dot::Book(weight.packing.format); }
    // What a step of an integer is worth.
    float unit() const { return weight.packing.has_book() ? book_of(weight.packing.format).unit : 1.0f; }

    static constexpr bool kStepsRows = false;

    // What rounds the chunks of a row of activations.
    const CodePanels& of_row(const Float32*) const { return *this; }

    // `values` of a chunk, of which `size` exist, as integers; returns what they stand for.
    template <Span span, int64_t values, int parts>
    Affine rounded(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size) const {
        const Affine how = round_chunk<span, values>(out, sums, x, size);
        return {how.scale * unit(), how.zero};
    }
};

// int8 with a scale per output, which is applied at the end.
struct Int8Panels : CodePanels<Int8Dot<kChunk>> {
    static constexpr Span kSpan = Span::kRange;
    static constexpr bool kShifts = false, kScalesOutputs = true;

    template <int P, int64_t most_parts>
    using Groups = NoGroups;

    Lanes16 scale(int64_t index) const { return weight.scale_stream().at(index); }
};

// The same by activations that have one step for all of a row, and may become any integers of 8 bits. Where they have zero
// points, `code_sums` is what the integers of each output come to.
struct SteppedInt8Panels : CodePanels<Int8Dot<kChunk>> {
    static constexpr Span kSpan = Span::kMagnitude;
    static constexpr bool kShifts = false, kScalesOutputs = true, kStepsRows = true;

    const Rounding& how;
    const Float32* code_sums;

    struct Row {
        const Rounding& how;
        Step step;

        template <Span, int64_t values, int parts>
        Affine rounded(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size) const {
            return round_in_steps<values>(out, sums, x, size, how, step);
        }
    };

    Row of_row(const Float32* x) const { return {how, step_of(how, x, weight.inputs)}; }
    template <int P, int64_t most_parts>
    using Groups = NoGroups;

    Lanes16 scale(int64_t index) const { return weight.scale_stream().at(index); }
    // What takes the zero point out of a row's sums.
    Lanes16 without_zero(const Step& step, int64_t index) const {
        return code_sums ? load16(code_sums + index * kPanel) * splat16(-step.zero) : splat16(0.0f);
    }
};

// Codes with scales, and perhaps zero points or minimums, per group of k.
template <class DotType, Span span, bool shifts>
struct GroupPanels : CodePanels<DotType> {
    static constexpr Span kSpan = span;
    static constexpr bool kShifts = shifts, kScalesOutputs = false;

    template <int P, int64_t most_parts>
    using Groups = quire::QUIRE_ISA::Groups<P, most_parts, shifts>;

    GroupStreams streams{this->weight, DotType::kPart};
};

template <int64_t part, bool shifts>
using Int8Groups = GroupPanels<Int8Dot<part>, Span::kRange, shifts>;
template <int64_t part, bool shifts>
using Int6Groups = GroupPanels<Int6Dot<part>, Span::kRange, shifts>;
template <int64_t part, bool shifts>
using Int4Groups = GroupPanels<Int4Dot<part>, Span::kMagnitude, shifts>;

template <int64_t part>
using BookGroups = GroupPanels<BookDot<part>, Span::kPair, false>;

template <class Type>
struct Of { using type = Type; };

// Calls body(Of<Panels>{}) with the panels of a format, for the fast mode; there must be one.
template <class Body>
inline auto with_code_panels(const Packing& packing, Body body) {
    const bool fine = packing.group == 16, shifts = packing.shifts();
    if (packing.has_book()) return fine ? body(Of<BookGroups<16>>{}) : body(Of<BookGroups<32>>{});
    if (packing.format == kInt4) {
        if (fine) return body(Of<Int4Groups<16, true>>{});
        return shifts ? body(Of<Int4Groups<32, true>>{}) : body(Of<Int4Groups<32, false>>{});
    }
    if (packing.format == kInt6) {
        if (fine) return shifts ? body(Of<Int6Groups<16, true>>{}) : body(Of<Int6Groups<16, false>>{});
        return shifts ? body(Of<Int6Groups<32, true>>{}) : body(Of<Int6Groups<32, false>>{});
    }
    if (!packing.group && !shifts) return body(Of<Int8Panels>{});
    if (fine) return body(Of<Int8Groups<16, true>>{});
    return shifts ? body(Of<Int8Groups<32, true>>{}) : body(Of<Int8Groups<32, false>>{});
}

// With `tiled` a row's chunk lies together, and not the rows' values of a quad, and weights come without their zero point.
template <class Panels, bool tiled = false>
struct IntKernel {
    const Linear& job;
    Panels panels;
    int64_t num_chunks = job.weight.padded() / kChunk;

    using Dot = typename Panels::Dot;

    static constexpr int kMostRows = kIntRows;
    static constexpr bool kEven = true;
    static constexpr int64_t kWords = tiled ? 1 : Dot::kWords;
    static constexpr int64_t kChunkSteps = kChunk / (kQuad * Dot::kQuads), kChunkWords = kChunk / kQuad * kWords;
    static constexpr int kParts = kChunk / Dot::kPart;
    // Scales that a row has for a chunk. A real model's activations have few large values, whose ranges cost all that share them;
    // where a part's sum is scaled anyway, a range of its own is nearly free.
    static constexpr int kSpans = Panels::kSpan == Span::kRange && Dot::kPart <= kChunk / 2 ? 2 : 1;
    static constexpr int64_t kSpanSize = kChunk / kSpans;
    // Whether sums need what weights come to.
    static constexpr bool kNeedsSums = Panels::kSpan == Span::kRange && (tiled || !Dot::kTakesPoints);
    // Steps whose weights are unpacked together: 16 KiB of registers, half of a first-level cache.
    static constexpr int64_t kWideSteps = 16384 / static_cast<int64_t>(sizeof(typename Dot::Weights));
    static constexpr int64_t kBlockChunks = kWideSteps / kChunkSteps;
    static constexpr bool kUnpacks = Dot::kUnpackTiles != kNever;
    // Panels that a tile takes at once. 4-bit integers without minimums gain most where each activation is read once for two;
    // all others where the sums of one stay in registers.
    static constexpr int kTilePanels = Panels::kSpan == Span::kMagnitude && !Panels::kShifts && !Panels::kScalesOutputs ? kWidePanels : 1;

    // The scratch memory: words of all rows of the block, then their scales, then what their sums start with, then their
    // negated sums, and then their zero points; each tile is contiguous. Behind them are the rows' steps.
    int32_t* words(int64_t row) const { return static_cast<int32_t*>(job.scratch) + row * num_chunks * kChunkWords; }
    Float32* scales(const Tiling& tiling, int64_t row) const {
        return reinterpret_cast<Float32*>(words(tiling.rows)) + row * kSpans * num_chunks;
    }
    int32_t* starts(const Tiling& tiling, int64_t row) const {
        return words(tiling.rows) + (tiling.rows * kSpans + row * kParts) * num_chunks;
    }
    Float32* minus(const Tiling& tiling, int64_t row) const {
        return reinterpret_cast<Float32*>(starts(tiling, tiling.rows)) + row * kParts * num_chunks;
    }
    Float32* points(const Tiling& tiling, int64_t row) const {
        return minus(tiling, tiling.rows) + row * kSpans * num_chunks;
    }
    Step& step(const Tiling& tiling, int64_t row) const { return reinterpret_cast<Step*>(points(tiling, tiling.rows))[row]; }
    PackedRows packed(const Tiling& tiling, int64_t tile, int64_t chunk) const {
        const int64_t start = tiling.start(tile), skip = chunk * tiling.size(tile);
        return {words(start) + skip * kChunkWords, scales(tiling, start) + skip * kSpans, points(tiling, start) + skip * kSpans,
                starts(tiling, start) + skip * kParts, minus(tiling, start) + skip * kParts};
    }

    void pack(const Tiling& tiling, int64_t tile) const {
        const int64_t rows = tiling.size(tile), start = tiling.start(tile), inputs = job.weight.inputs;
        for (int64_t r = 0; r < rows; ++r) {
            const Float32* x = job.row(start + r);
            const auto& of_row = panels.of_row(x);
            if constexpr (Panels::kStepsRows) step(tiling, start + r) = of_row.step;
            for (int64_t span = 0; span < num_chunks * kSpans; ++span) {
                const int64_t at = span * kSpanSize, left = inputs - at, size = left < kSpanSize ? left : kSpanSize;
                pack_span(of_row, tiling, start, span, r, rows, x + at, size < 0 ? 0 : size);
            }
        }
    }

    // Rounds `size` values of a tile's row that share a scale.
    template <class OfRow>
    void pack_span(const OfRow& of_row, const Tiling& tiling, int64_t start, int64_t span, int64_t row, int64_t rows,
                   const Float32* x, int64_t size) const {
        constexpr int kSpanParts = kParts / kSpans;
        constexpr int64_t kSpanWords = kChunkWords / kSpans;
        alignas(64) int8_t rounded[kSpanSize];
        int32_t sums[kSpanParts] = {};
        const Affine how = of_row.template rounded<Panels::kSpan, kSpanSize>(rounded, sums, x, size);
        scales(tiling, start)[span * rows + row].value = how.scale;
        if (kNeedsSums) points(tiling, start)[span * rows + row].value = static_cast<float>(how.zero);
        for (int64_t part = 0; part < kSpanParts; ++part) {
            const int8_t* values = rounded + part * Dot::kPart;
            const int64_t place = (span * kSpanParts + part) * rows + row;
            const int32_t whole = sums[part] + how.zero * static_cast<int32_t>(Dot::kPart);
            if (!tiled) starts(tiling, start)[place] = Dot::start_word(values, kNeedsSums ? sums[part] : whole, -panels.zero());
            if (Panels::kShifts) minus(tiling, start)[place].value = static_cast<float>(-whole);
        }
        if constexpr (tiled) {
            int32_t* chunk = words(start) + (span / kSpans * rows + row) * kChunkWords;
            __builtin_memcpy(chunk + span % kSpans * kSpanWords, rounded, kSpanSize);
            return;
        }
        int32_t* out = words(start) + span * kSpanWords * rows + row * kWords;
        Dot::template put<kSpanSize>(out, rows * kWords, rounded, how.zero);
    }

    void multiply(const Tiling& tiling, Tiles tiles, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        const int64_t start = tiling.start(tiles.begin), rows = tiling.start(tiles.end) - start;
        const Outputs outputs = outputs_of(panel, count);
        begin(sums, tiling, start, rows, panel, count);
        if (tiling.tiles == 1) multiply_tile_of_rows(sums, tiling, panel, count);
        else for_panels<1, 1, kTilePanels>(count, [&](auto width, int64_t p) {
            multiply_panels<decltype(width)::value>(sums + p * kPanel, count * kPanel, tiling, tiles, panel + p, outputs);
        });
        if constexpr (Panels::kStepsRows) scale_rows(sums, tiling, start, rows, count);
        outputs.write(start, rows, sums);
    }

    // What the sums [rows][count][16] of some rows with some panels begin with.
    void begin(Float32* sums, const Tiling& tiling, int64_t start, int64_t rows, int64_t panel, int64_t count) const {
        for (int64_t row = start; row < start + rows; ++row) {
            for (int64_t p = 0; p < count; ++p, sums += kPanel) {
                Lanes16 first = splat16(0.0f);
                if constexpr (Panels::kStepsRows) first = panels.without_zero(step(tiling, row), panel + p);
                store16(sums, first);
            }
        }
    }

    void scale_rows(Float32* sums, const Tiling& tiling, int64_t start, int64_t rows, int64_t count) const {
        for (int64_t row = start; row < start + rows; ++row) {
            const Lanes16 scale = splat16(step(tiling, row).scale);
            for (int64_t p = 0; p < count; ++p, sums += kPanel) store16(sums, load16(sums) * scale);
        }
    }

    Outputs outputs_of(int64_t panel, int64_t count) const {
        Outputs outputs(job, panel, count);
        if constexpr (Panels::kScalesOutputs) {
            for (int64_t p = 0; p < count; ++p) outputs.scale(p, panels.scale(panel + p));
        }
        return outputs;
    }

    const uint8_t* packed_weights(int64_t panel, int64_t chunk) const {
        return panels.panel(panel) + chunk * kChunkSteps * Dot::kBytes;
    }

    // What some chunks of P panels are scaled by, of at most so many.
    template <int P, int64_t most_chunks>
    using Groups = typename Panels::template Groups<P, most_chunks * kParts>;

    template <int P, int64_t most_chunks>
    Groups<P, most_chunks> groups(int64_t panel, int64_t chunk, int64_t chunks) const {
        return {panels, panel, chunk * kParts, chunks * kParts};
    }

    using RowOfOnes = std::conditional_t<kNeedsSums, Ones<Dot>, NoOnes>;

    template <int P, int64_t most_chunks>
    using KeptSums = std::conditional_t<kNeedsSums, PartSums<P, most_chunks * kParts>, NoPartSums>;

    // What the weights of some chunks of P panels come to, of at most so many; those at `next` are fetched meanwhile.
    template <int P, int64_t most_chunks>
    KeptSums<P, most_chunks> part_sums(int64_t panel, int64_t chunk, int64_t chunks, const RowOfOnes& ones,
                                       const uint8_t* next) const {
        KeptSums<P, most_chunks> sums;
        if constexpr (kNeedsSums) {
            sums.template find<Dot>(packed_weights(panel, chunk), panels.bytes, chunks * kParts,
                                            panels.book(), ones, next);
        }
        return sums;
    }

    // All rows are one tile: panels are read side by side.
    void multiply_tile_of_rows(Float32* sums, const Tiling& tiling, int64_t panel, int64_t count) const {
        constexpr CodeSums kSums = kNeedsSums ? CodeSums::kAlong : CodeSums::kNone;
        const int64_t ahead = streams_are_fetched_ahead() ? kBytesAhead : 0;
        const RowOfOnes ones(panels.zero());
        with_rows<kMostRows>(tiling.rows, [&](auto rows) {
            constexpr int R = decltype(rows)::value;
            for_panels<R, kMostRows * kWidePanels, 1>(count, [&](auto width, int64_t p) {
                constexpr int P = decltype(width)::value;
                for (int64_t chunk = 0; chunk < num_chunks; chunk += kBlockChunks) {
                    const int64_t left = num_chunks - chunk, size = left < kBlockChunks ? left : kBlockChunks;
                    const uint8_t* from = packed_weights(panel + p, chunk);
                    multiply_chunks<R, P, kSoon, kSums, kSpans, Dot>(
                        sums + p * kPanel, count * kPanel, packed(tiling, 0, chunk), from, panels.bytes,
                        groups<P, kBlockChunks>(panel + p, chunk, size), NoPartSums(), ones, panels.book(), size, from + ahead);
                }
            });
        });
    }

    // Block after block of k, each for all tiles while it is in the first-level cache, and the next one on its way to the
    // second.
    template <int P>
    void multiply_panels(Float32* sums, int64_t stride, const Tiling& tiling, Tiles tiles, int64_t panel,
                         const Outputs& outputs) const {
        constexpr int64_t kBlock = kBlockChunks / P, kBlockBytes = kBlock * kChunkSteps * Dot::kBytes;
        const int64_t first_row = tiling.start(tiles.begin);
        const bool unpacks = tiles.end - tiles.begin >= Dot::kUnpackTiles;
        static_assert(P == 1 || !kUnpacks, "one panel's weights are unpacked together");
        constexpr CodeSums kSums = kNeedsSums ? CodeSums::kBefore : CodeSums::kNone;
        const RowOfOnes ones(panels.zero());
        typename Dot::Weights unpacked[kUnpacks ? kWideSteps : 1];
        for (int64_t chunk = 0; chunk < num_chunks; chunk += kBlock) {
            const int64_t left = num_chunks - chunk, size = left < kBlock ? left : kBlock;
            const uint8_t* from = packed_weights(panel, chunk);
            const auto scaled = groups<P, kBlock>(panel, chunk, size);
            const auto kept = part_sums<P, kBlock>(panel, chunk, size, ones, from + kBlockBytes);
            if constexpr (kUnpacks) {
                for (int64_t step = 0; unpacks && step < size * kChunkSteps; ++step) {
                    unpacked[step] = Dot::unpack(from + step * Dot::kBytes, panels.book());
                }
            }
            for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
                if (size == left) outputs.fetch(tiling.start(tile), tiling.size(tile));
                with_rows<kMostRows>(tiling.size(tile), [&](auto rows) {
                    auto multiply = [&](const auto* weights, int64_t panel_stride) {
                        multiply_chunks<decltype(rows)::value, P, kLater, kSums, kSpans, Dot>(
                            sums + (tiling.start(tile) - first_row) * stride, stride, packed(tiling, tile, chunk), weights,
                            panel_stride, scaled, kept, ones, panels.book(), size, from + kBlockBytes);
                    };
                    if constexpr (kUnpacks) {
                        if (unpacks) return multiply(unpacked, int64_t{0});
                    }
                    multiply(from, panels.bytes);
                });
            }
        }
    }
};

// Makes the kernel of a job.
template <class Panels>
struct MakeInt {
    IntKernel<Panels> operator()(const Linear& job) const { return {job, {job.weight}}; }
};

struct MakeStepped {
    const Rounding& how;
    const Float32* code_sums;

    IntKernel<SteppedInt8Panels> operator()(const Linear& job) const { return {job, {{job.weight}, how, code_sums}}; }
};

}}}  // namespace quire::QUIRE_ISA
