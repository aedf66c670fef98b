// SPDX-License-Identifier: Apache-2.0
// Sixteen lanes: one register where the processor has such, four on Arm, else two of eight.
//
// Linears and attention use them; everything else is written for the eight lanes of vec.h.

#pragma once

#include "vec.h"

#ifdef QUIRE_NEON

#include "lanes16_neon.h"

#else

namespace quire { namespace QUIRE_ISA { namespace {

#ifdef __AVX512F__

constexpr int kRegisters16 = 1;

struct Lanes16 { __m512 all; };
struct Ints16 { __m512i all; };

inline Lanes16 splat16(float x) { return {_mm512_set1_ps(x)}; }
inline Ints16 splat16(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Lanes16 fma(Lanes16 a, Lanes16 b, Lanes16 c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
inline Lanes16 operator*(Lanes16 a, Lanes16 b) { return {a.all * b.all}; }
inline Lanes16 operator+(Lanes16 a, Lanes16 b) { return {a.all + b.all}; }
inline Lanes16 operator-(Lanes16 a, Lanes16 b) { return {a.all - b.all}; }
inline Ints16 operator*(Ints16 a, Ints16 b) { return {_mm512_mullo_epi32(a.all, b.all)}; }
inline Ints16 operator-(Ints16 a, Ints16 b) { return {_mm512_sub_epi32(a.all, b.all)}; }
// The intrinsic's undefined lanes, of which there are none, make GCC 12 warn.
inline Lanes16 to_floats(Ints16 v) {
    typedef int32_t Words __attribute__((vector_size(64)));
    return {reinterpret_cast<__m512>(__builtin_convertvector(reinterpret_cast<Words>(v.all), Wide))};
}

// What a function of two vectors makes of them.
template <class Function>
inline Lanes16 by_vectors(Function function, Lanes16 a, Lanes16 b) {
    return {reinterpret_cast<__m512>(function(reinterpret_cast<Wide>(a.all), reinterpret_cast<Wide>(b.all)))};
}

inline Ints16 load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Ints16 bits_of(Ints16 v, int64_t shift, int32_t mask) {
    return {_mm512_and_si512(_mm512_srli_epi32(v.all, static_cast<unsigned>(shift)), _mm512_set1_epi32(mask))};
}

// The bfloat16 in each word's high, or low, half.
inline Lanes16 high_halves(Ints16 v) {
    return {reinterpret_cast<__m512>(_mm512_and_si512(v.all, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))))};
}
inline Lanes16 low_halves(Ints16 v) { return {reinterpret_cast<__m512>(_mm512_slli_epi32(v.all, 16))}; }

inline Lanes16 load16(const Float32* p) { return {_mm512_loadu_ps(p)}; }
inline void store16(Float32* p, Lanes16 v) { _mm512_storeu_ps(p, v.all); }
inline Lanes16 load16(const Float16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline Lanes16 load16(const BFloat16* p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {reinterpret_cast<__m512>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
inline Lanes16 load16(const Int8* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Ints16 load16(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

#else

constexpr int kRegisters16 = 2;

struct Lanes16 { Vec low, high; };
struct Ints16 { Ints low, high; };

inline Lanes16 splat16(float x) { return {splat(x), splat(x)}; }
inline Ints16 splat16(int32_t x) { return {x + Ints{}, x + Ints{}}; }
inline Lanes16 fma(Lanes16 a, Lanes16 b, Lanes16 c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }
inline Lanes16 operator*(Lanes16 a, Lanes16 b) { return {a.low * b.low, a.high * b.high}; }
inline Lanes16 operator+(Lanes16 a, Lanes16 b) { return {a.low + b.low, a.high + b.high}; }
inline Lanes16 operator-(Lanes16 a, Lanes16 b) { return {a.low - b.low, a.high - b.high}; }
inline Ints16 operator*(Ints16 a, Ints16 b) { return {a.low * b.low, a.high * b.high}; }
inline Ints16 operator-(Ints16 a, Ints16 b) { return {a.low - b.low, a.high - b.high}; }
inline Lanes16 to_floats(Ints16 v) { return {__builtin_convertvector(v.low, Vec), __builtin_convertvector(v.high, Vec)}; }

template <class Function>
inline Lanes16 by_vectors(Function function, Lanes16 a, Lanes16 b) {
    return {function(a.low, b.low), function(a.high, b.high)};
}

inline Ints16 load_words(const void* p) {
    Ints16 v;
    __builtin_memcpy(&v.low, p, sizeof v.low);
    __builtin_memcpy(&v.high, static_cast<const char*>(p) + sizeof v.low, sizeof v.high);
    return v;
}
inline Ints16 bits_of(Ints16 v, int64_t shift, int32_t mask) {
    return {v.low >> static_cast<int32_t>(shift) & mask, v.high >> static_cast<int32_t>(shift) & mask};
}

inline Lanes16 high_halves(Ints16 v) {
    return {as_floats(reinterpret_cast<Bits>(v.low) & 0xffff0000), as_floats(reinterpret_cast<Bits>(v.high) & 0xffff0000)};
}
inline Lanes16 low_halves(Ints16 v) {
    return {as_floats(reinterpret_cast<Bits>(v.low) << 16), as_floats(reinterpret_cast<Bits>(v.high) << 16)};
}

template <class T>
inline Lanes16 load16(const T* p) { return {load(p, All{}), load(p + kLanes, All{})}; }
inline void store16(Float32* p, Lanes16 v) {
    store(p, v.low, All{});
    store(p + kLanes, v.high, All{});
}
inline Ints16 load16(const uint8_t* p) {
    UnsignedBytes low, high;
    __builtin_memcpy(&low, p, sizeof low);
    __builtin_memcpy(&high, p + sizeof low, sizeof high);
    return {zero_extend(low), zero_extend(high)};
}

#endif

}}}  // namespace quire::QUIRE_ISA

#endif
