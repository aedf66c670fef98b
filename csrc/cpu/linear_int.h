// Linear on integer weights: activations rounded to 16 bits per row (fast mode), or widened weights (precise mode).
//
// Without the dot-product instructions, multiplying pairs of 16-bit integers is as fast as pairs of bytes with their
// corrections, so activations keep 16 bits and the rounding hardly shows. Sums of a chunk of k are exact integers; the
// chunks, which lie at fixed k, are added in float32 in order.

#pragma once

#include "linear_float.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Tiles of rows from which widening a panel of integers once is cheaper than doing so in every tile.
constexpr int64_t kWideIntTiles = 4;

constexpr float kActivationMax = 32767.0f;

// Activations below are 0: their scale's inverse would not be finite.
constexpr float kActivationMin = 1e-30f;

// Multiply 16 pairs of 16-bit integers and add neighbours: eight int32.
inline Ints multiply_pairs(Shorts a, Shorts b) {
#ifdef __AVX2__
    return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
    Ints sums;
    for (int64_t j = 0; j < kLanes; ++j) sums[j] = int32_t{a[2 * j]} * b[2 * j] + int32_t{a[2 * j + 1]} * b[2 * j + 1];
    return sums;
#endif
}

inline Shorts splat_pair(int32_t pair) {
    return reinterpret_cast<Shorts>(Ints{pair, pair, pair, pair, pair, pair, pair, pair});
}

// A panel's weights for one pair of k, widened.
struct alignas(32) Wide { int16_t values[2 * kPanel]; };

inline Pairs16 load_pairs(const Wide* p) {
    Pairs16 pairs;
    __builtin_memcpy(&pairs.low, p->values, sizeof pairs.low);
    __builtin_memcpy(&pairs.high, p->values + kPanel, sizeof pairs.high);
    return pairs;
}

// What chunks of k share: where their scales are, and the sums of activations that take the zero points out again.
template <class Scale>
struct Chunks {
    int64_t pairs, size;       // all pairs of k, and those of one chunk
    const Scale* scales;       // [chunk][16] of the first panel, or null for a scale of 1
    const uint8_t* zeros;      // likewise; null: every zero point is `zero`
    int64_t panel_scales;      // from one panel's scales or zeros to the next one's
    int32_t zero;
    const int32_t* x_sums;     // [R][x_stride], a sum per chunk; null: the weights' zero points are out already
    int64_t x_stride;
};

inline Ints load_zeros(const uint8_t* p) {
    typedef uint8_t Eight __attribute__((vector_size(8)));
    Eight bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, Ints);
}

// sums[R][stride] += scale * (x . (w - zero)) over all chunks of k for P panels. A chunk's sum is exact.
template <int R, int P, class W, class Scale>
inline void multiply_chunks(Float32* sums, int64_t stride, const int32_t* x, const W* w, int64_t step,
                            int64_t panel_stride, const Chunks<Scale>& chunks, bool fresh) {
    for (int64_t start = 0, chunk = 0; start < chunks.pairs; start += chunks.size, ++chunk) {
        const int64_t left = chunks.pairs - start, end = start + (left < chunks.size ? left : chunks.size);
        Ints acc[R][P][2] = {};
        for (int64_t k = start; k < end; ++k) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                const Pairs16 weights = load_pairs(w + p * panel_stride + k * step);
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) {
                    const Shorts value = splat_pair(x[k * R + r]);
                    acc[r][p][0] += multiply_pairs(value, weights.low);
                    acc[r][p][1] += multiply_pairs(value, weights.high);
                }
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
                const int64_t at = p * chunks.panel_scales + chunk * kPanel + h * kLanes;
                const Vec scale = chunks.scales ? load(chunks.scales + at, All{}) : splat(1.0f);
                const Ints zero = chunks.zeros ? load_zeros(chunks.zeros + at) : chunks.zero + Ints{};
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) {
                    Ints exact = acc[r][p][h];
                    if (chunks.x_sums) exact -= zero * chunks.x_sums[r * chunks.x_stride + chunk];
                    Float32* sum = sums + r * stride + p * kPanel + h * kLanes;
                    const Vec before = fresh && chunk == 0 ? Vec{} : load(sum, All{});
                    store(sum, fma(__builtin_convertvector(exact, Vec), scale, before), All{});
                }
            }
        }
    }
}

// int8 panels: chunks of 512 with one scale per output, which is applied at the end.
struct Int8Panels {
    const Weight& weight;

    static constexpr bool kDirect = false;
    static constexpr int64_t kStep = 2 * kPanel;

    using Element = Int8;
    using Scale = Float32;

    int64_t pairs() const { return (weight.inputs + 1) / 2; }
    int64_t chunk_pairs() const { return kInt8Chunk / 2; }
    int64_t panel_elements() const { return pairs() * kStep; }
    const Int8* panel(int64_t index) const { return static_cast<const Int8*>(weight.data) + index * panel_elements(); }
    Chunks<Scale> chunks(int64_t, const int32_t*) const {
        return {pairs(), chunk_pairs(), nullptr, nullptr, 0, 0, nullptr, 0};
    }
    Pairs16 chunk_zeros(int64_t, int64_t) const { return {Shorts{}, Shorts{}}; }

    void widen(Float32* wide, int64_t index, int64_t start, int64_t count) const {
        const Int8* from = panel(index) + start / 2 * kStep;
        for (int64_t k = 0; k < count; ++k) {
            for (int64_t j = 0; j < kPanel; ++j) {
                wide[k * kPanel + j].value = static_cast<float>(from[k / 2 * kStep + 2 * j + k % 2].value);
            }
        }
    }

    void scale(Float32* sums, int64_t index) const {
        const Float32* scales = static_cast<const Float32*>(weight.scales) + index * kPanel;
        for_each_vector(kPanel, [&](int64_t i, auto lanes) {
            store(sums + i, load(sums + i, lanes) * load(scales + i, lanes), lanes);
        });
    }
};

// int4 panels: a chunk is a group with its scales and zero points.
struct Int4Panels {
    const Weight& weight;

    static constexpr bool kDirect = false;
    static constexpr int64_t kStep = kPanel;

    using Element = Int4;
    using Scale = BFloat16;

    int64_t pairs() const { return weight.groups() * weight.group / 2; }
    int64_t chunk_pairs() const { return weight.group / 2; }
    int64_t panel_elements() const { return pairs() * kStep; }
    const Int4* panel(int64_t index) const { return static_cast<const Int4*>(weight.data) + index * panel_elements(); }
    int64_t first_scale(int64_t index) const { return index * weight.groups() * kPanel; }
    const Scale* panel_scales(int64_t index) const { return static_cast<const Scale*>(weight.scales) + first_scale(index); }
    const uint8_t* panel_zeros(int64_t index) const { return weight.zeros ? weight.zeros + first_scale(index) : nullptr; }

    Chunks<Scale> chunks(int64_t index, const int32_t* x_sums) const {
        return {pairs(), chunk_pairs(), panel_scales(index), panel_zeros(index), weight.groups() * kPanel, 8, x_sums,
                weight.groups()};
    }

    Pairs16 chunk_zeros(int64_t index, int64_t chunk) const {
        constexpr uint8_t eights[kPanel] = {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8};
        return spread_zeros(weight.zeros ? panel_zeros(index) + chunk * kPanel : eights);
    }

    void widen(Float32* wide, int64_t index, int64_t start, int64_t count) const {
        for (int64_t k = 0; k < count; ++k) {
            const int64_t chunk = (start + k) / weight.group;
            const Scale* scales = panel_scales(index) + chunk * kPanel;
            const uint8_t* zeros = weight.zeros ? panel_zeros(index) + chunk * kPanel : nullptr;
            const Int4* from = panel(index) + (start + k) / 2 * kStep + k % 2;
            Float32 values[kPanel];
            for (int64_t j = 0; j < kPanel; ++j) {
                const int q = j < kLanes ? from[2 * j].nibbles & 15 : from[2 * (j - kLanes)].nibbles >> 4;
                values[j].value = static_cast<float>(q - (zeros ? zeros[j] : 8));
            }
            for (int64_t h = 0; h < kPanel; h += kLanes) {
                store(wide + k * kPanel + h, load(values + h, All{}) * load(scales + h, All{}), All{});
            }
        }
    }

    void scale(Float32*, int64_t) const {}
};

template <class Panels>
struct IntKernel {
    const Linear& job;
    Panels panels;

    // Pairs of k that are widened together: 16 KiB, half of a first-level cache; a multiple of every chunk.
    static constexpr int64_t kWidePairs = 256;

    // Of a row of the block; NaN if one of its activations is not finite.
    float* row_scales() const { return static_cast<float*>(job.scratch); }
    int32_t* packed(int64_t row) const { return static_cast<int32_t*>(job.scratch) + kBlockRows + row * panels.pairs(); }
    int64_t num_chunks() const { return (panels.pairs() + panels.chunk_pairs() - 1) / panels.chunk_pairs(); }
    // A row's sums of packed activations, one per chunk.
    int32_t* chunk_sums(const Tiling& tiling, int64_t row) const { return packed(tiling.rows) + row * num_chunks(); }

    void pack(int64_t first, const Tiling& tiling, int64_t tile) const {
        const int64_t rows = tiling.size(tile), start = tiling.start(tile), inputs = job.weight.inputs;
        int32_t* out = packed(start);
        for (int64_t i = 0; i < rows * panels.pairs(); ++i) out[i] = 0;
        for (int64_t i = 0; i < rows * num_chunks(); ++i) chunk_sums(tiling, start)[i] = 0;
        for (int64_t r = 0; r < rows; ++r) {
            const Float32* x = job.x + (first + start + r) * inputs;
            row_scales()[start + r] = pack_row(out + r, rows, chunk_sums(tiling, start + r), x, inputs);
        }
    }

    // Rounds a row to 16 bits, pairs of k `stride` apart, and returns its scale.
    float pack_row(int32_t* out, int64_t stride, int32_t* sums, const Float32* x, int64_t inputs) const {
        Vec largest = {}, poison = {};
        for_each_vector(inputs, [&](int64_t i, auto lanes) {
            const Vec v = load(x + i, lanes), magnitude = as_floats(as_bits(v) & 0x7fffffff);
            largest = magnitude > largest ? magnitude : largest;
            poison = poison + v * 0.0f;
        });
        if (!(sum(poison) == 0.0f)) return __builtin_nanf("");
        float extreme = 0.0f;
        for (int64_t j = 0; j < kLanes; ++j) extreme = largest[j] > extreme ? largest[j] : extreme;
        if (extreme < kActivationMin) return 0.0f;
        const Vec inverse = splat(kActivationMax / extreme);
        const int64_t chunk = 2 * panels.chunk_pairs();
        for_each_vector(inputs, [&](int64_t i, auto lanes) {
            // Adding 1.5 * 2^23 leaves the rounded value in the low bits.
            const Bits bits = as_bits(load(x + i, lanes) * inverse + 12582912.0f);
            for (int64_t j = 0; j < kLanes && i + j < inputs; ++j) {
                out[(i + j) / 2 * stride] |= static_cast<int32_t>((bits[j] & 0xffff) << ((i + j) % 2 * 16));
                sums[i / chunk] += static_cast<int16_t>(bits[j]);
            }
        });
        return extreme / kActivationMax;
    }

    void multiply(int64_t first, const Tiling& tiling, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        if (tiling.tiles < kWideIntTiles) multiply_direct(sums, tiling, panel, count);
        else multiply_wide(sums, tiling, panel, count);
        for (int64_t row = 0; row < tiling.rows; ++row) {
            Float32* at = sums + row * count * kPanel;
            for (int64_t p = 0; p < count; ++p) panels.scale(at + p * kPanel, panel + p);
            const Vec scale = splat(row_scales()[row]);
            for_each_vector(count * kPanel, [&](int64_t i, auto lanes) { store(at + i, load(at + i, lanes) * scale, lanes); });
            finish_row(job, first + row, panel, count, at);
        }
    }

    void multiply_direct(Float32* sums, const Tiling& tiling, int64_t panel, int64_t count) const {
        const int64_t stride = count * kPanel;
        for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
            const int64_t start = tiling.start(tile);
            with_rows(tiling.size(tile), [&](auto rows) {
                constexpr int R = decltype(rows)::value, P = R == 1 ? 4 : R <= 3 ? 2 : 1;
                auto multiply = [&](auto width, int64_t p) {
                    multiply_chunks<R, decltype(width)::value>(
                        sums + start * stride + p * kPanel, stride, packed(start), panels.panel(panel + p), Panels::kStep,
                        panels.panel_elements(), panels.chunks(panel + p, chunk_sums(tiling, start)), true);
                };
                int64_t p = 0;
                for (; p + P <= count; p += P) multiply(std::integral_constant<int, P>{}, p);
                for (; p < count; ++p) multiply(std::integral_constant<int, 1>{}, p);
            });
        }
    }

    void multiply_wide(Float32* sums, const Tiling& tiling, int64_t panel, int64_t count) const {
        Wide wide[kWidePairs];
        const int64_t stride = count * kPanel, all = panels.pairs(), size = panels.chunk_pairs();
        for (int64_t p = 0; p < count; ++p) {
            for (int64_t start = 0; start < all; start += kWidePairs) {
                const int64_t pairs = all - start < kWidePairs ? all - start : kWidePairs;
                widen(wide, panel + p, start, pairs);
                auto chunks = panels.chunks(panel + p, nullptr);
                chunks.pairs = pairs;
                if (chunks.scales) chunks.scales += start / size * kPanel;
                for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
                    const int64_t row = tiling.start(tile);
                    with_rows(tiling.size(tile), [&](auto rows) {
                        constexpr int R = decltype(rows)::value;
                        multiply_chunks<R, 1>(sums + row * stride + p * kPanel, stride, packed(row) + start * R, wide,
                                              int64_t{1}, int64_t{0}, chunks, start == 0);
                    });
                }
            }
        }
    }

    // Weights less their zero points.
    void widen(Wide* wide, int64_t panel, int64_t start, int64_t pairs) const {
        const auto* from = panels.panel(panel) + start * Panels::kStep;
        for (int64_t first = 0; first < pairs; first += panels.chunk_pairs()) {
            const Pairs16 zeros = panels.chunk_zeros(panel, (start + first) / panels.chunk_pairs());
            for (int64_t k = first; k < pairs && k < first + panels.chunk_pairs(); ++k) {
                const Pairs16 weights = load_pairs(from + k * Panels::kStep);
                const Shorts low = weights.low - zeros.low, high = weights.high - zeros.high;
                __builtin_memcpy(wide[k].values, &low, sizeof low);
                __builtin_memcpy(wide[k].values + kPanel, &high, sizeof high);
            }
        }
    }
};

template <class Panels>
inline void run_int(const Linear& job, Panels panels, bool fast) {
    if (fast) run(job, IntKernel<Panels>{job, panels});
    else run_float(job, panels);
}

}}}  // namespace quire::QUIRE_ISA
