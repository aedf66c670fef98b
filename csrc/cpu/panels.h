// Packed weights: how a matrix [N, K] lies in memory so that every kernel can vectorise over outputs.
//
// A panel holds 16 outputs. Float panels are [K][16]; integer panels walk k in pairs, [K / 2][16][2], because that is what
// one multiply-add of 16-bit integers eats. Rows beyond N and k beyond K are 0. A matrix in two halves (gate and up of an
// MLP) alternates their panels, so that the outputs that belong together are made together.

#pragma once

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kPanel = 16;

// Formats of packed weights, by the codes that callers pass; the first three are those of DType.
enum Format : int64_t { kInt8 = 3, kInt4 = 4 };

// k values whose products with 16-bit activations add up in an int32 without overflow: 512 * 127 * 32767 < 2^31.
constexpr int64_t kInt8Chunk = 512;

typedef int16_t Shorts __attribute__((vector_size(32)));
typedef uint16_t UShorts __attribute__((vector_size(32)));
typedef int8_t PanelBytes __attribute__((vector_size(16)));
typedef uint8_t UBytes __attribute__((vector_size(16)));

struct Int4 { uint8_t nibbles; };

// A packed matrix. Integer formats: int8 has a float32 scale per output; int4 has a bfloat16 scale, and an integer zero
// point in 0..15, per output and group of k, [panel][group][16].
struct Weight {
    const void* data;
    const void* scales;
    const uint8_t* zeros;
    int64_t outputs, inputs, halves, group;

    int64_t half() const { return outputs / halves; }
    int64_t panels() const { return (half() + kPanel - 1) / kPanel * halves; }
    int64_t groups() const { return (inputs + group - 1) / group; }
    // First row of a panel, and how many of its outputs exist.
    int64_t row(int64_t panel) const { return panel % halves * half() + panel / halves * kPanel; }
    int64_t count(int64_t panel) const {
        const int64_t left = half() - panel / halves * kPanel;
        return left < kPanel ? left : kPanel;
    }
};

struct Lanes16 { Vec low, high; };

inline Lanes16 load16(const Float32* p) { return {load(p, All{}), load(p + kLanes, All{})}; }

// Output j stands beside output j + 8: a shift and a mask widen both.
inline Lanes16 load16(const BFloat16* p) {
    Bits b;
    __builtin_memcpy(&b, p, sizeof b);
    return {as_floats(b << 16), as_floats(b & 0xffff0000)};
}

inline Lanes16 load16(const Float16* p) { return {load(p, All{}), load(p + kLanes, All{})}; }

// Where output j of a panel stands in a row of 16.
inline int64_t place(int64_t j, Float32) { return j; }
inline int64_t place(int64_t j, BFloat16) { return j % kLanes * 2 + j / kLanes; }
inline int64_t place(int64_t j, Float16) { return j; }

inline float to_float(Float32 x) { return x.value; }
template <class T>
inline float to_float(T x) { return load(&x, First{1})[0]; }

// 16 outputs times two values of k: vectors of 8 outputs, the two k side by side.
struct Pairs16 { Shorts low, high; };

#ifdef __AVX2__

// One instruction each, which the compiler does not find by itself.
inline Shorts widen(PanelBytes v) { return reinterpret_cast<Shorts>(_mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(v))); }
inline UShorts widen(UBytes v) { return reinterpret_cast<UShorts>(_mm256_cvtepu8_epi16(reinterpret_cast<__m128i>(v))); }

#else

inline Shorts widen(PanelBytes v) { return __builtin_convertvector(v, Shorts); }
inline UShorts widen(UBytes v) { return __builtin_convertvector(v, UShorts); }

#endif

inline Pairs16 load_pairs(const Int8* p) {
    PanelBytes a, b;
    __builtin_memcpy(&a, p, sizeof a);
    __builtin_memcpy(&b, p + 16, sizeof b);
    return {widen(a), widen(b)};
}

// Low nibbles are outputs 0 to 7, high nibbles outputs 8 to 15; the zero point is still in them.
inline Pairs16 load_pairs(const Int4* p) {
    UBytes bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    const UShorts wide = widen(bytes);
    return {reinterpret_cast<Shorts>(wide & 15), reinterpret_cast<Shorts>(wide >> 4)};
}

// Each zero point twice: for both values of k.
inline Pairs16 spread_zeros(const uint8_t* zeros) {
    Pairs16 spread;
    for (int64_t j = 0; j < kLanes; ++j) {
        spread.low[2 * j] = spread.low[2 * j + 1] = zeros[j];
        spread.high[2 * j] = spread.high[2 * j + 1] = zeros[kLanes + j];
    }
    return spread;
}

}}}  // namespace quire::QUIRE_ISA
