// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters (E. Hu et al., 2021, arXiv:2106.09685): what each row's own adapter adds to a product.
//
// Rows are sorted by adapter, and those of one are multiplied together, a few at a time, so that its weights are read once. A
// sum over inputs is made of kChains sums, each over every kChains-th input; those over ranks go in their order. So no
// neighbor changes a bit.

#pragma once

#include "lanes16.h"
#include "linear.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kWidth = 16;             // ranks, or outputs, that are made together
constexpr int64_t kAdapterColumns = 1024;  // outputs of a job
constexpr int64_t kWeightsAhead = 1024;    // of those that few rows read, fetched before

// Rows that are multiplied together, and sums of each, so that all stay in registers and enough of them advance at once.
#ifdef __AVX512F__
constexpr int kAdaptedRows = 6, kChains = 4;
#else
constexpr int kAdaptedRows = 3, kChains = 2;
#endif

// Registers of sixteen outputs that are made together of R rows: the ranks of a weight lie far apart, so that much of each
// is read at once.
template <int R>
constexpr int kRegistersOf = R < 3 ? 8 / R / kRegisters16 : kRegisters16 == 1 ? 2 : 1;

// Slots for adapters as Python passes them; see quire/kernels/low_rank.py.
struct Stacks {
    const void *a, *b;
    const Float32* scales;
    const int32_t *ranks, *affine;
    const Float32 *factors, *offsets;
    const int64_t* ends;
    int64_t slots, parts, inputs, outputs, most, dtype;

    int64_t rank(int64_t slot, int64_t part) const { return ranks[slot * parts + part]; }
    bool is_affine(int64_t slot, int64_t part) const { return affine[slot * parts + part]; }
    bool changes(int64_t slot) const {
        for (int64_t part = 0; part < parts; ++part)
            if (rank(slot, part) || is_affine(slot, part)) return true;
        return false;
    }
    // What scratch memory takes, in floats, for so many rows.
    int64_t scratch(int64_t rows) const { return rows * (parts * most + 2) + slots + 1; }
};

// Rows of out, of x, or those of its rows that `numbers` names, and the slot of each; negative: none.
struct AdaptedRows {
    Float32* out;
    const Float32* x;
    const int32_t* slots;
    int64_t count;
    const int32_t* numbers = nullptr;
};

// Rows that change, those of one adapter side by side, in pieces that are multiplied together. Memory: what lies between the two
// products [rows, parts, most], the order of rows, where pieces begin, and where the rows of each slot end.
class Pieces {
public:
    int64_t count = 0, sorted = 0;
    Float32* shrunk;
    int32_t *order, *begins;

    Pieces(const Stacks& of, const AdaptedRows& rows, Float32* scratch)
        : shrunk(scratch), order(reinterpret_cast<int32_t*>(scratch + rows.count * of.parts * of.most)),
          begins(order + rows.count) {
        sort(of, rows, begins + rows.count + 1);
        for (int64_t place = 0; place < sorted; ++place) {
            const bool goes_on = count && place - begins[count - 1] < kAdaptedRows &&
                                 rows.slots[order[place]] == rows.slots[order[place - 1]];
            if (!goes_on) begins[count++] = static_cast<int32_t>(place);
        }
        begins[count] = static_cast<int32_t>(sorted);
    }

private:
    void sort(const Stacks& of, const AdaptedRows& rows, int32_t* ends) {
        for (int64_t slot = 0; slot < of.slots; ++slot) ends[slot] = 0;
        for (int64_t row = 0; row < rows.count; ++row)
            if (rows.slots[row] >= 0) ++ends[rows.slots[row]];
        for (int64_t slot = 0; slot < of.slots; ++slot) {
            const int32_t size = of.changes(slot) ? ends[slot] : 0;
            ends[slot] = size ? static_cast<int32_t>(sorted) : -1;
            sorted += size;
        }
        for (int64_t row = 0; row < rows.count; ++row) {
            const int32_t slot = rows.slots[row];
            if (slot >= 0 && ends[slot] >= 0) order[ends[slot]++] = static_cast<int32_t>(row);
        }
    }
};

template <class W>
inline Lanes16 load_first(const W* p, int64_t count) {
    W padded[kWidth] = {};
    for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
    return load16(padded);
}

inline Lanes16 plus(Lanes16 a, Lanes16 b) { return fma(a, splat16(1.0f), b); }

// R rows, from a place on, of one adapter whose weights are of type W.
template <int R, class W>
struct Piece {
    const Stacks& of;
    const AdaptedRows& rows;
    const Pieces& pieces;
    int64_t place, slot;

    Piece(const Stacks& of, const AdaptedRows& rows, const Pieces& pieces, int64_t place)
        : of(of), rows(rows), pieces(pieces), place(place), slot(rows.slots[pieces.order[place]]) {}

    Float32* middle(int64_t r, int64_t part) const { return pieces.shrunk + ((place + r) * of.parts + part) * of.most; }
    Float32* out(int64_t r) const { return rows.out + pieces.order[place + r] * of.outputs; }
    const Float32* x(int64_t r) const {
        const int64_t row = pieces.order[place + r];
        return rows.x + (rows.numbers ? rows.numbers[row] : row) * of.inputs;
    }

    // Sixteen ranks of a part.
    void shrink(int64_t part, int64_t first) const {
        if (first >= of.rank(slot, part)) return;
        const W* a = static_cast<const W*>(of.a) + (slot * of.parts + part) * of.inputs * of.most + first;
        const Float32* from[R];
        Lanes16 sums[kChains][R];
        for (int r = 0; r < R; ++r) from[r] = x(r);
        for (int c = 0; c < kChains; ++c)
            for (int r = 0; r < R; ++r) sums[c][r] = splat16(0.0f);
        const auto add = [&](int64_t k, int c) {
            const W* weight = a + k * of.most;
            if (R < 3) __builtin_prefetch(weight + kWeightsAhead);
            const Lanes16 weights = load16(weight);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[c][r] = fma(splat16(from[r][k].value), weights, sums[c][r]);
        };
        int64_t k = 0;
        for (; k + kChains <= of.inputs; k += kChains) {
#pragma GCC unroll 4
            for (int c = 0; c < kChains; ++c) add(k + c, c);
        }
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c)
            if (k + c < of.inputs) add(k + c, c);
        const Lanes16 scale = load16(of.scales + (slot * of.parts + part) * of.most + first);
        for (int r = 0; r < R; ++r) {
            Lanes16 sum = sums[0][r];
            for (int c = 1; c < kChains; ++c) sum = plus(sums[c][r], sum);
            store16(middle(r, part) + first, sum * scale);
        }
    }

    // Outputs of a part.
    void expand(int64_t part, int64_t from, int64_t to) const {
        constexpr int V = kRegistersOf<R>;
        for (; to - from >= V * kWidth; from += V * kWidth) expand_whole<V>(part, from);
        for (; to - from >= kWidth; from += kWidth) expand_whole<1>(part, from);
        for (int r = 0; r < R && from < to; ++r) expand_some(r, part, from, to - from);
    }

private:
    const W* b(int64_t column) const { return static_cast<const W*>(of.b) + slot * of.most * of.outputs + column; }

    // V times sixteen outputs; the next ones are fetched.
    template <int V>
    void expand_whole(int64_t part, int64_t column) const {
        const W* weights_of = b(column);
        const int64_t rank = of.rank(slot, part);
        const Float32* from[R];
        Lanes16 sums[R][V];
        for (int r = 0; r < R; ++r) {
            from[r] = middle(r, part);
            for (int v = 0; v < V; ++v) sums[r][v] = splat16(0.0f);
        }
        for (int64_t i = 0; i < rank; ++i) {
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                const W* weight = weights_of + i * of.outputs + v * kWidth;
                __builtin_prefetch(weight + V * kWidth);
                const Lanes16 weights = load16(weight);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) sums[r][v] = fma(splat16(from[r][i].value), weights, sums[r][v]);
            }
        }
        const int64_t own = slot * of.outputs + column;
        const bool is_affine = of.is_affine(slot, part);
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) {
                Float32* to = out(r) + column + v * kWidth;
                Lanes16 base = load16(to);
                if (is_affine) base = fma(base, load16(of.factors + own + v * kWidth), load16(of.offsets + own + v * kWidth));
                store16(to, plus(sums[r][v], base));
            }
        }
    }

    // The last outputs of a part, fewer than sixteen, of one row.
    void expand_some(int64_t r, int64_t part, int64_t column, int64_t count) const {
        Lanes16 sums = splat16(0.0f);
        for (int64_t i = 0; i < of.rank(slot, part); ++i) {
            sums = fma(splat16(middle(r, part)[i].value), load_first(b(column) + i * of.outputs, count), sums);
        }
        Float32* to = out(r) + column;
        Lanes16 base = load_first(to, count);
        if (of.is_affine(slot, part)) {
            const int64_t own = slot * of.outputs + column;
            base = fma(base, load_first(of.factors + own, count), load_first(of.offsets + own, count));
        }
        Float32 padded[kWidth];
        store16(padded, plus(sums, base));
        for (int64_t i = 0; i < count; ++i) to[i] = padded[i];
    }
};

// Calls body with each piece's rows and weights as its type says; neighbors of a slot come one after the other in each job, so
// that what they share of its weights is near.
template <class W, class Body>
inline void for_pieces(int64_t jobs, int64_t work, const Stacks& of, const AdaptedRows& rows, const Pieces& pieces,
                       const Body& body) {
    share(jobs * pieces.count, work, [&](int64_t item) {
        const int64_t job = item / pieces.count, begin = pieces.begins[item % pieces.count];
        with_rows<kAdaptedRows>(pieces.begins[item % pieces.count + 1] - begin, [&](auto count) {
            body(Piece<decltype(count)::value, W>(of, rows, pieces, begin), job);
        });
    });
}

// Calls body with the type of weights.
template <class Body>
inline int64_t with_weights(int64_t dtype, Body body) {
    return dtype == quire::kInt8 ? body(Int8{}) : with_dtype(dtype, body);
}

// Adds to rows of out what their adapters make of those of x; every slot exists. `scratch` is as much as stacks say.
inline void add_adapters(const Stacks& of, const AdaptedRows& rows, Float32* scratch) {
    const Pieces pieces(of, rows, scratch);
    if (!pieces.count) return;
    const int64_t groups = of.most / kWidth, work = pieces.sorted * of.most;
    with_weights(of.dtype, [&](auto type) {
        using W = decltype(type);
        for_pieces<W>(of.parts * groups, work * of.parts * of.inputs, of, rows, pieces, [&](const auto& piece, int64_t job) {
            piece.shrink(job / groups, job % groups * kWidth);
        });
        const int64_t jobs = (of.outputs + kAdapterColumns - 1) / kAdapterColumns;
        for_pieces<W>(jobs, work * of.outputs, of, rows, pieces, [&](const auto& piece, int64_t job) {
            const int64_t begin = job * kAdapterColumns, end = begin + kAdapterColumns;
            for (int64_t part = 0; part < of.parts; ++part) {
                if (!of.rank(piece.slot, part) && !of.is_affine(piece.slot, part)) continue;
                const int64_t from = of.ends[part] > begin ? of.ends[part] : begin;
                const int64_t to = of.ends[part + 1] < end ? of.ends[part + 1] : end;
                if (from < to) piece.expand(part, from, to);
            }
        });
        return int64_t{0};
    });
}

}}}  // namespace quire::QUIRE_ISA
