// SPDX-License-Identifier: Apache-2.0
// Eight float32 lanes, and loads and stores of every element type through them.
//
// Kernel sources are compiled once per instruction set, with QUIRE_ISA naming it. All that they include lives in an
// anonymous namespace: a shared inline function compiled with raised flags could be the copy the linker keeps.

#pragma once

#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__ARM_NEON) && !defined(QUIRE_PLAIN)
#define QUIRE_NEON
#include <arm_neon.h>
#endif

namespace quire { namespace QUIRE_ISA { namespace {

typedef float Vec __attribute__((vector_size(32)));
typedef float Quad __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(8)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(8)));

constexpr int64_t kLanes = 8;

inline int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

struct Float32 { float value; };
struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };
struct Int8 { int8_t value; };

inline Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x}; }
inline Bits as_bits(Vec v) { return reinterpret_cast<Bits>(v); }
inline Vec as_floats(Bits v) { return reinterpret_cast<Vec>(v); }

#ifdef QUIRE_NEON
inline float32x4_t low_half(Vec v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
inline float32x4_t high_half(Vec v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }
inline Vec joined(float32x4_t low, float32x4_t high) { return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7); }
#endif

inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef __FMA__
    return reinterpret_cast<Vec>(_mm256_fmadd_ps(a, b, c));
#elif defined(QUIRE_NEON)
    return joined(vfmaq_f32(low_half(c), low_half(a), low_half(b)), vfmaq_f32(high_half(c), high_half(a), high_half(b)));
#else
    return a * b + c;
#endif
}

#ifdef __AVX512F__
// Sixteen lanes in one register, for what is written for any number of lanes: its bits are the same.
typedef float Wide __attribute__((vector_size(64)));
typedef uint32_t WideBits __attribute__((vector_size(64)));

inline Vec low_half(Wide v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
inline Vec high_half(Wide v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
inline WideBits as_bits(Wide v) { return reinterpret_cast<WideBits>(v); }
inline Wide as_floats(WideBits v) { return reinterpret_cast<Wide>(v); }
inline Wide fma(Wide a, Wide b, Wide c) {
    return reinterpret_cast<Wide>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                                                  reinterpret_cast<__m512>(c)));
}
#endif

// The same number in each lane.
template <class V>
inline V all_lanes(float x) { return V{} + x; }

// The halves of a vector are folded onto each other three times: one fixed tree, so that the same eight numbers always give
// the same sum.
template <class Fold>
inline float fold(Vec v, Fold with) {
    const Quad four = with(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7));
    const Quad two = with(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
    return with(two, __builtin_shufflevector(two, two, 1, 1, 1, 1))[0];
}

inline float sum(Vec v) {
    return fold(v, [](Quad a, Quad b) -> Quad { return a + b; });
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float largest(Vec v) {
    return fold(v, [](Quad a, Quad b) -> Quad { return a > b ? a : b; });
}

// The compiler's own conversions between lane widths take four instructions where one will do.
#ifdef __AVX2__
inline Bits zero_extend(Halves h) { return reinterpret_cast<Bits>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(h))); }
inline Ints sign_extend(Bytes b) {
    return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(reinterpret_cast<int64_t>(b))));
}
inline Ints zero_extend(UnsignedBytes b) {
    return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(reinterpret_cast<int64_t>(b))));
}
// Lanes must fit 16 bits.
inline Halves truncate(Bits b) {
    const __m256i wide = reinterpret_cast<__m256i>(b);
    return reinterpret_cast<Halves>(_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}
#else
inline Bits zero_extend(Halves h) { return __builtin_convertvector(h, Bits); }
inline Ints sign_extend(Bytes b) { return __builtin_convertvector(b, Ints); }
inline Ints zero_extend(UnsignedBytes b) { return __builtin_convertvector(b, Ints); }
inline Halves truncate(Bits b) { return __builtin_convertvector(b, Halves); }
#endif

inline Vec widen(Halves h, BFloat16) { return as_floats(zero_extend(h) << 16); }

inline Halves narrow(Vec v, BFloat16) {
    const Bits bits = as_bits(v);
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    const Bits quiet_nan = (bits >> 16) | 0x40;
    return truncate((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

#ifdef __F16C__

inline Vec widen(Halves h, Float16) {
    return reinterpret_cast<Vec>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(h)));
}

inline Halves narrow(Vec v, Float16) {
    return reinterpret_cast<Halves>(_mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(QUIRE_NEON)

inline Vec widen(Halves h, Float16) {
    const float16x8_t halves = reinterpret_cast<float16x8_t>(h);
    return joined(vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves));
}

inline Halves narrow(Vec v, Float16) {
    return reinterpret_cast<Halves>(vcvt_high_f16_f32(vcvt_f16_f32(low_half(v)), high_half(v)));
}

#else

inline Vec widen(Halves h, Float16) {
    const Bits wide = zero_extend(h);
    // Scaling by 2^112 re-biases the exponent, and makes normal numbers of subnormal ones.
    const Bits magnitude = as_bits(as_floats((wide & 0x7fff) << 13) * splat(0x1p112f));
    const Bits special = magnitude | 0x7f800000;  // infinities and NaNs keep their payload
    return as_floats(((wide & 0x7c00) == 0x7c00 ? special : magnitude) | ((wide & 0x8000) << 16));
}

inline Halves narrow(Vec v, Float16) {
    const Bits bits = as_bits(v), magnitude = bits & 0x7fffffff;
    // Adding 0.5 leaves a subnormal half in the low bits, rounded to nearest even by the addition itself.
    const Bits subnormal = as_bits(as_floats(magnitude) + splat(0.5f)) - 0x3f000000;
    const Bits normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const Bits nan = ((magnitude >> 13) & 0x3ff) | 0x7e00;
    const Bits infinity = magnitude * 0 + 0x7c00;
    const Bits finite = magnitude < 0x38800000 ? subnormal : normal;
    const Bits large = magnitude > 0x7f800000 ? nan : infinity;
    return truncate((magnitude < 0x47800000 ? finite : large) | ((bits >> 16) & 0x8000));
}

#endif

// How many lanes of a vector belong to the row: all of them, or the first few.
struct All {};
struct First { int64_t count; };

inline Vec load(const Float32* p, All) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

inline void store(Float32* p, Vec v, All) { __builtin_memcpy(p, &v, sizeof v); }

inline Vec load(const Int8* p, All) {
    Bytes b;
    __builtin_memcpy(&b, p, sizeof b);
    return __builtin_convertvector(sign_extend(b), Vec);
}

template <class T>
inline Vec load(const T* p, All) {
    Halves h;
    __builtin_memcpy(&h, p, sizeof h);
    return widen(h, T{});
}

template <class T>
inline void store(T* p, Vec v, All) {
    const Halves h = narrow(v, T{});
    __builtin_memcpy(p, &h, sizeof h);
}

// Missing lanes read as 0.
template <class T>
inline Vec load(const T* p, First lanes) {
    T padded[kLanes] = {};
    for (int64_t i = 0; i < lanes.count; ++i) padded[i] = p[i];
    return load(padded, All{});
}

template <class T>
inline void store(T* p, Vec v, First lanes) {
    T padded[kLanes];
    store(padded, v, All{});
    for (int64_t i = 0; i < lanes.count; ++i) p[i] = padded[i];
}

// Element i of vector j becomes element j of vector i: halves, then pairs, then elements change places.
inline void transpose(Vec (&v)[kLanes]) {
    for (int i = 0; i < 4; ++i) {
        const Vec x = v[i], y = v[i + 4];
        v[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11);
        v[i + 4] = __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < kLanes; i += (i & 1) ? 3 : 1) {
        const Vec x = v[i], y = v[i + 2];
        v[i] = __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13);
        v[i + 2] = __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < kLanes; i += 2) {
        const Vec x = v[i], y = v[i + 1];
        v[i] = __builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14);
        v[i + 1] = __builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15);
    }
}

// Calls body(offset, lanes) over a row of n elements, whole vectors first.
template <class Body>
inline void for_each_vector(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, All{});
    if (i < n) body(i, First{n - i});
}

// e^x with a relative error near 1e-7; x is held to [-87, 87] so that neither end leaves the normal range.
template <class V>
inline V exp(V x) {
    x = x > 87.0f ? all_lanes<V>(87.0f) : x;
    x = x < -87.0f ? all_lanes<V>(-87.0f) : x;
    // Adding 1.5 * 2^23 rounds to an integer that stands in the low bits of the sum.
    const V shifted = fma(x, all_lanes<V>(1.44269504f), all_lanes<V>(12582912.0f));
    const V n = shifted - 12582912.0f;
    // ln 2 in two parts, the first exact in few enough bits that n times it is exact.
    const V r = fma(n, all_lanes<V>(2.12194440e-4f), fma(n, all_lanes<V>(-0.693359375f), x));
    constexpr float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    V series = all_lanes<V>(1.0f / 5040);  // |r| <= ln 2 / 2
    for (float coefficient : taylor) series = fma(series, r, all_lanes<V>(coefficient));
    return series * as_floats((as_bits(shifted) + (127 - 0x4b400000)) << 23);
}

// 2^x for x <= 127 with a relative error near 2e-7: exactly 1 at 0, and exactly 0 below -126, so that -infinity may mark
// what does not count.
template <class V>
inline V exp2(V x) {
    const V shifted = x + 12582912.0f;
    const V r = x - (shifted - 12582912.0f);
    // Least relative error on [-1/2, 1/2] among polynomials that are 1 at 0.
    constexpr float coefficients[] = {9.6184369e-3f, 5.5503324e-2f, 0.24022648f, 0.69314718f, 1.0f};
    V series = fma(all_lanes<V>(1.5353362e-4f), r, all_lanes<V>(1.3398874e-3f));
    for (float coefficient : coefficients) series = fma(series, r, all_lanes<V>(coefficient));
    const V power = series * as_floats((as_bits(shifted) + (127 - 0x4b400000)) << 23);
    return x < -126.0f ? V{} : power;
}

constexpr float kLog2E = 1.44269504f;

// Through 2^x; its error is near 1e-7 of 1, not of the result.
template <class V>
inline V tanh(V x) {
    V doubled = x * (2 * kLog2E);
    doubled = doubled > 126.0f ? all_lanes<V>(126.0f) : doubled;
    return 1.0f - 2.0f / (exp2(doubled) + 1.0f);
}

}}}  // namespace quire::QUIRE_ISA
