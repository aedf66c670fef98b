// Linear on integer weights: activations rounded to 16 bits per row (fast mode), or widened weights (precise mode).
//
// Without the dot-product instructions, multiplying pairs of 16-bit integers is as fast as pairs of bytes with their
// corrections, so activations keep 16 bits and the rounding hardly shows. Sums of a chunk of k are exact integers; the
// chunks, which lie at fixed k, are added in float32 in order.

#pragma once

#include "linear_float.h"

namespace quire { namespace QUIRE_ISA { namespace {

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

inline Pairs16 load_pairs(const Pairs16* p) { return *p; }

// One chunk of k for R rows and P panels: sums[R][stride] += scale * (x . (w - zero)), where no scale means 1.
template <int R, int P, class W, class Scales>
inline void multiply_chunk(float* sums, int64_t stride, const int32_t* x, const W* w, int64_t step, int64_t panel_stride,
                           int64_t pairs, const Pairs16* zeros, const Scales* scales, int64_t scale_stride, bool fresh) {
    Ints acc[R][P][2] = {};
    for (int64_t k = 0; k < pairs; ++k) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const W* at = w + p * panel_stride + k * step;
            if (R <= 3) __builtin_prefetch(reinterpret_cast<const char*>(at) + kPrefetch);
            Pairs16 weights = load_pairs(at);
            if (zeros) weights = {weights.low - zeros[p].low, weights.high - zeros[p].high};
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const Shorts value = splat_pair(x[k * R + r]);
                acc[r][p][0] += multiply_pairs(value, weights.low);
                acc[r][p][1] += multiply_pairs(value, weights.high);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) {
            for (int h = 0; h < 2; ++h) {
                Float32* sum = reinterpret_cast<Float32*>(sums + r * stride + p * kPanel + h * kLanes);
                const Vec before = fresh ? Vec{} : load(sum, All{});
                const Vec exact = __builtin_convertvector(acc[r][p][h], Vec);
                const Vec scale = scales ? load(scales + p * scale_stride + h * kLanes, All{}) : splat(1.0f);
                store(sum, fma(exact, scale, before), All{});
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
    const Scale* chunk_scales(int64_t, int64_t) const { return nullptr; }
    int64_t scale_stride() const { return 0; }
    const Pairs16* chunk_zeros(Pairs16*, int64_t, int64_t, int64_t) const { return nullptr; }

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
    const Scale* chunk_scales(int64_t index, int64_t chunk) const {
        return static_cast<const Scale*>(weight.scales) + (index * weight.groups() + chunk) * kPanel;
    }
    int64_t scale_stride() const { return weight.groups() * kPanel; }

    const Pairs16* chunk_zeros(Pairs16* spread, int64_t index, int64_t count, int64_t chunk) const {
        constexpr uint8_t eights[kPanel] = {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8};
        for (int64_t p = 0; p < count; ++p) {
            const uint8_t* zeros = weight.zeros ? weight.zeros + ((index + p) * weight.groups() + chunk) * kPanel : eights;
            spread[p] = spread_zeros(zeros);
        }
        return spread;
    }

    void widen(Float32* wide, int64_t index, int64_t start, int64_t count) const {
        for (int64_t k = 0; k < count; ++k) {
            const int64_t chunk = (start + k) / weight.group;
            const Scale* scales = chunk_scales(index, chunk);
            const uint8_t* zeros = weight.zeros ? weight.zeros + (index * weight.groups() + chunk) * kPanel : nullptr;
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

    static constexpr int64_t kMaxChunkPairs = kInt8Chunk / 2;

    // Of a row of the block; NaN if one of its activations is not finite.
    float* row_scales() const { return static_cast<float*>(job.scratch); }
    int32_t* packed(int64_t row) const { return static_cast<int32_t*>(job.scratch) + kBlockRows + row * panels.pairs(); }

    void pack(int64_t first, const Tiling& tiling, int64_t tile) const {
        const int64_t rows = tiling.size(tile), inputs = job.weight.inputs, pairs = panels.pairs();
        int32_t* out = packed(tiling.start(tile));
        for (int64_t i = 0; i < rows * pairs; ++i) out[i] = 0;
        for (int64_t r = 0; r < rows; ++r) {
            const Float32* x = job.x + (first + tiling.start(tile) + r) * inputs;
            Vec largest = {}, poison = {};
            for_each_vector(inputs, [&](int64_t i, auto lanes) {
                const Vec v = load(x + i, lanes), magnitude = as_floats(as_bits(v) & 0x7fffffff);
                largest = magnitude > largest ? magnitude : largest;
                poison = poison + v * 0.0f;
            });
            float extreme = 0.0f;
            for (int64_t j = 0; j < kLanes; ++j) extreme = largest[j] > extreme ? largest[j] : extreme;
            const bool finite = sum(poison) == 0.0f, usable = finite && extreme >= kActivationMin;
            row_scales()[tiling.start(tile) + r] = !finite ? __builtin_nanf("") : usable ? extreme / kActivationMax : 0.0f;
            if (!usable) continue;
            const Vec inverse = splat(kActivationMax / extreme);
            for_each_vector(inputs, [&](int64_t i, auto lanes) {
                // Adding 1.5 * 2^23 leaves the rounded value in the low bits.
                const Bits q = as_bits(load(x + i, lanes) * inverse + 12582912.0f);
                for (int64_t j = 0; j < kLanes && i + j < inputs; ++j) {
                    out[(i + j) / 2 * rows + r] |= static_cast<int32_t>((q[j] & 0xffff) << ((i + j) % 2 * 16));
                }
            });
        }
    }

    void multiply(int64_t first, const Tiling& tiling, int64_t panel, int64_t count) const {
        alignas(64) Float32 sums[kBlockRows * 2 * kPanel];
        float* raw = reinterpret_cast<float*>(sums);
        if (tiling.tiles < kWideTiles) multiply_direct(raw, tiling, panel, count);
        else multiply_wide(raw, tiling, panel, count);
        for (int64_t row = 0; row < tiling.rows; ++row) {
            Float32* at = sums + row * count * kPanel;
            for (int64_t p = 0; p < count; ++p) panels.scale(at + p * kPanel, panel + p);
            const Vec scale = splat(row_scales()[row]);
            for_each_vector(count * kPanel, [&](int64_t i, auto lanes) { store(at + i, load(at + i, lanes) * scale, lanes); });
            finish_row(job, first + row, panel, count, at);
        }
    }

    void multiply_direct(float* sums, const Tiling& tiling, int64_t panel, int64_t count) const {
        Pairs16 spread[kUnitPanels];
        const int64_t stride = count * kPanel, chunk_pairs = panels.chunk_pairs();
        for (int64_t start = 0, chunk = 0; start < panels.pairs(); start += chunk_pairs, ++chunk) {
            const int64_t left = panels.pairs() - start, pairs = left < chunk_pairs ? left : chunk_pairs;
            const Pairs16* zeros = panels.chunk_zeros(spread, panel, count, chunk);
            for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
                with_rows(tiling.size(tile), [&](auto rows) {
                    constexpr int R = decltype(rows)::value, P = R == 1 ? 4 : R <= 3 ? 2 : 1;
                    const int32_t* x = packed(tiling.start(tile)) + start * R;
                    float* out = sums + tiling.start(tile) * stride;
                    auto step = [&](auto width, int64_t p) {
                        multiply_chunk<R, decltype(width)::value>(
                            out + p * kPanel, stride, x, panels.panel(panel + p) + start * Panels::kStep, Panels::kStep,
                            panels.panel_elements(), pairs, zeros ? zeros + p : nullptr,
                            panels.chunk_scales(panel + p, chunk), panels.scale_stride(), start == 0);
                    };
                    int64_t p = 0;
                    for (; p + P <= count; p += P) step(std::integral_constant<int, P>{}, p);
                    for (; p < count; ++p) step(std::integral_constant<int, 1>{}, p);
                });
            }
        }
    }

    void multiply_wide(float* sums, const Tiling& tiling, int64_t panel, int64_t count) const {
        Pairs16 wide[kMaxChunkPairs], spread[1];
        const int64_t stride = count * kPanel, chunk_pairs = panels.chunk_pairs();
        for (int64_t p = 0; p < count; ++p) {
            for (int64_t start = 0, chunk = 0; start < panels.pairs(); start += chunk_pairs, ++chunk) {
                const int64_t left = panels.pairs() - start, pairs = left < chunk_pairs ? left : chunk_pairs;
                const Pairs16* zeros = panels.chunk_zeros(spread, panel + p, 1, chunk);
                for (int64_t k = 0; k < pairs; ++k) {
                    wide[k] = load_pairs(panels.panel(panel + p) + (start + k) * Panels::kStep);
                    if (zeros) wide[k] = {wide[k].low - zeros->low, wide[k].high - zeros->high};
                }
                for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
                    with_rows(tiling.size(tile), [&](auto rows) {
                        constexpr int R = decltype(rows)::value;
                        multiply_chunk<R, 1>(sums + tiling.start(tile) * stride + p * kPanel, stride,
                                             packed(tiling.start(tile)) + start * R, wide, int64_t{1}, int64_t{0}, pairs,
                                             static_cast<const Pairs16*>(nullptr),
                                             panels.chunk_scales(panel + p, chunk), int64_t{0}, start == 0);
                    });
                }
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
