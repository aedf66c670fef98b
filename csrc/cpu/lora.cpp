// Low-rank adapters (E. Hu et al., 2021, arXiv:2106.09685): what each row's own adapter adds to a product.
//
// A row's sums are taken over inputs, and then over ranks, in their order; neighbours with the same adapter are multiplied
// together, so that its weights are read once, and change no bit.

#include "kernels.h"
#include "lanes16.h"

#include <type_traits>

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kWidth = 16;
constexpr int64_t kTile = 4;        // rows that may be multiplied together
constexpr int64_t kColumns = 1024;  // outputs of a job

// Registers of sixteen outputs that are made together of R rows: the ranks of a weight lie far apart, so that much of each
// is read at once.
template <int R>
constexpr int kRegistersOf = R < 3 ? 8 / R / kRegisters16 : kRegisters16 == 1 ? 2 : 1;

template <class W>
struct Adapters {
    Float32* out;
    const Float32* x;
    const int32_t* slots;  // of each row; negative: none
    const W *a, *b;
    const float* scales;
    const int32_t* ranks;
    const int32_t* affine;
    const Float32 *factors, *offsets;  // [slots, outputs]
    const int64_t* ends;
    Float32* shrunk;  // [rows, parts, most]
    int64_t rows, parts, inputs, outputs, most;

    int64_t rank(int64_t slot, int64_t part) const { return ranks[slot * parts + part]; }
    bool is_affine(int64_t slot, int64_t part) const { return affine[slot * parts + part]; }
    Float32* middle(int64_t row, int64_t part) const { return shrunk + (row * parts + part) * most; }
};

// Calls body(count, row, slot) for each run of neighbours in a tile that have one adapter; the count is a constant.
template <class Body>
inline void for_each_run(const int32_t* slots, int64_t begin, int64_t end, const Body& body) {
    for (int64_t row = begin; row < end;) {
        const int64_t slot = slots[row];
        int64_t count = 1;
        while (row + count < end && slots[row + count] == slot) ++count;
        if (slot >= 0) {
            switch (count) {
                case 1: body(std::integral_constant<int, 1>{}, row, slot); break;
                case 2: body(std::integral_constant<int, 2>{}, row, slot); break;
                case 3: body(std::integral_constant<int, 3>{}, row, slot); break;
                default: body(std::integral_constant<int, 4>{}, row, slot);
            }
        }
        row += count;
    }
}

template <class W>
inline Lanes16 load_some(const W* p, int64_t count) {
    W padded[kWidth] = {};
    for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
    return load16(padded);
}

// Sixteen ranks of a part, of R rows.
template <int R, class W>
inline void shrink(const Adapters<W>& of, int64_t row, int64_t slot, int64_t part, int64_t first) {
    const int64_t rank = of.rank(slot, part);
    if (first >= rank) return;
    const W* a = of.a + (slot * of.parts + part) * of.inputs * of.most + first;
    const Float32* x = of.x + row * of.inputs;
    Lanes16 sums[R];
    for (int r = 0; r < R; ++r) sums[r] = splat16(0.0f);
    for (int64_t k = 0; k < of.inputs; ++k) {
        const Lanes16 weights = load16(a + k * of.most);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r] = fma(splat16(x[r * of.inputs + k].value), weights, sums[r]);
    }
    const Lanes16 scale = splat16(of.scales[slot * of.parts + part]);
    for (int r = 0; r < R; ++r) store16(of.middle(row + r, part) + first, sums[r] * scale);
}

// V times sixteen outputs of R rows; the next ones are fetched.
template <int R, int V, class W>
inline void expand(const Adapters<W>& of, int64_t row, int64_t slot, int64_t part, int64_t column) {
    const int64_t rank = of.rank(slot, part);
    const W* b = of.b + slot * of.most * of.outputs + column;
    Lanes16 sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = splat16(0.0f);
    for (int64_t i = 0; i < rank; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const W* weight = b + i * of.outputs + v * kWidth;
            __builtin_prefetch(weight + V * kWidth);
            const Lanes16 weights = load16(weight);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                sums[r][v] = fma(splat16(of.middle(row + r, part)[i].value), weights, sums[r][v]);
            }
        }
    }
    const bool is_affine = of.is_affine(slot, part);
    for (int v = 0; v < V; ++v) {
        const int64_t place = column + v * kWidth;
        for (int r = 0; r < R; ++r) {
            Float32* out = of.out + (row + r) * of.outputs + place;
            Lanes16 base = load16(out);
            if (is_affine) {
                const int64_t own = slot * of.outputs + place;
                base = fma(base, load16(of.factors + own), load16(of.offsets + own));
            }
            store16(out, fma(sums[r][v], splat16(1.0f), base));
        }
    }
}

// The last outputs of a part, fewer than sixteen, of one row.
template <class W>
inline void expand_some(const Adapters<W>& of, int64_t row, int64_t slot, int64_t part, int64_t column, int64_t count) {
    const W* b = of.b + slot * of.most * of.outputs + column;
    Lanes16 sums = splat16(0.0f);
    for (int64_t i = 0; i < of.rank(slot, part); ++i) {
        sums = fma(splat16(of.middle(row, part)[i].value), load_some(b + i * of.outputs, count), sums);
    }
    Float32* out = of.out + row * of.outputs + column;
    Lanes16 base = load_some(out, count);
    if (of.is_affine(slot, part)) {
        const int64_t own = slot * of.outputs + column;
        base = fma(base, load_some(of.factors + own, count), load_some(of.offsets + own, count));
    }
    Float32 padded[kWidth];
    store16(padded, fma(sums, splat16(1.0f), base));
    for (int64_t i = 0; i < count; ++i) out[i] = padded[i];
}

template <int R, class W>
inline void expand_columns(const Adapters<W>& of, int64_t row, int64_t slot, int64_t part, int64_t from, int64_t to) {
    constexpr int V = kRegistersOf<R>;
    for (; to - from >= V * kWidth; from += V * kWidth) expand<R, V>(of, row, slot, part, from);
    for (; to - from >= kWidth; from += kWidth) expand<R, 1>(of, row, slot, part, from);
    if (from == to) return;
    for (int r = 0; r < R; ++r) expand_some(of, row + r, slot, part, from, to - from);
}

template <class W>
inline void add_adapters(const Adapters<W>& of) {
    const int64_t tiles = (of.rows + kTile - 1) / kTile, groups = of.most / kWidth;
    const auto end_of = [&](int64_t tile) { return tile + 1 < tiles ? (tile + 1) * kTile : of.rows; };
    share(tiles * of.parts * groups, of.rows * of.parts * of.most * of.inputs, [&](int64_t item) {
        const int64_t tile = item / (of.parts * groups), part = item / groups % of.parts, first = item % groups * kWidth;
        for_each_run(of.slots, tile * kTile, end_of(tile), [&](auto count, int64_t row, int64_t slot) {
            shrink<decltype(count)::value>(of, row, slot, part, first);
        });
    });
    const int64_t jobs = (of.outputs + kColumns - 1) / kColumns;
    share(tiles * jobs, of.rows * of.most * of.outputs, [&](int64_t item) {
        const int64_t tile = item / jobs, begin = item % jobs * kColumns;
        const int64_t end = begin + kColumns < of.outputs ? begin + kColumns : of.outputs;
        for_each_run(of.slots, tile * kTile, end_of(tile), [&](auto count, int64_t row, int64_t slot) {
            for (int64_t part = 0; part < of.parts; ++part) {
                if (!of.rank(slot, part) && !of.is_affine(slot, part)) continue;
                const int64_t from = of.ends[part] > begin ? of.ends[part] : begin;
                const int64_t to = of.ends[part + 1] < end ? of.ends[part + 1] : end;
                if (from < to) expand_columns<decltype(count)::value>(of, row, slot, part, from, to);
            }
        });
    });
}

}  // namespace

// out [rows, outputs] += what the adapters make of x [rows, inputs]. `most` is a multiple of 16, and shrunk has room for
// [rows, parts, most]. Returns how many rows have an adapter that does not exist; then nothing was done.
int64_t lora_linear(void* out, const void* x, const int32_t* adapter_rows, const void* a, const void* b, const void* scales,
                    const void* ranks, const void* affine, const void* factors, const void* offsets, const void* ends,
                    void* shrunk, int64_t rows, int64_t slots, int64_t parts, int64_t inputs, int64_t outputs, int64_t most,
                    int64_t dtype) {
    int64_t refused = 0;
    bool any = false;
    for (int64_t row = 0; row < rows; ++row) {
        refused += adapter_rows[row] >= slots;
        any |= adapter_rows[row] >= 0;
    }
    if (refused || !any) return refused;
    return with_dtype(dtype, [&](auto type) -> int64_t {
        using W = decltype(type);
        add_adapters(Adapters<W>{static_cast<Float32*>(out), static_cast<const Float32*>(x), adapter_rows,
                                 static_cast<const W*>(a), static_cast<const W*>(b), static_cast<const float*>(scales),
                                 static_cast<const int32_t*>(ranks), static_cast<const int32_t*>(affine),
                                 static_cast<const Float32*>(factors), static_cast<const Float32*>(offsets),
                                 static_cast<const int64_t*>(ends), static_cast<Float32*>(shrunk), rows, parts, inputs,
                                 outputs, most});
        return 0;
    });
}

}}  // namespace quire::QUIRE_ISA
