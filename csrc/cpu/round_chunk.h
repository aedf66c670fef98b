// SPDX-License-Identifier: Apache-2.0
// Activations rounded to 8 bits, a chunk of k or half of one at a time, for products with integer weights.

#pragma once

#include "dot.h"
#include "panels.h"
#include "rounding.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr float kActivationMax = 127.0f;
static_assert(kInt8Pair > static_cast<int64_t>(kActivationMax), "rounding two values adds up to 1 to their sum");

// Activations below are 0: their scale's inverse would not be finite.
constexpr float kActivationMin = 1e-30f;

// What integers of 8 bits stand for: steps up to the largest magnitude, steps up to what the magnitudes of two neighbors come
// to at most, or steps that span the values and 0, less a zero point.
enum class Span { kMagnitude, kPair, kRange };

// An activation is scale * (integer + zero).
struct Affine {
    float scale;
    int32_t zero;

    float inverse() const { return 1.0f / scale; }
};

// Steps that span [low, high], which has 0 in it: 254, so that one more that rounding both ends may take fits into 8 bits, too.
inline Affine spanning(float low, float high) {
    const float scale = high / 254.0f - low / 254.0f;
    return {scale, static_cast<int32_t>(to_integer(low * (1.0f / scale))) + 128};
}

inline Vec swapped(Vec pairs) { return __builtin_shufflevector(pairs, pairs, 1, 0, 3, 2, 5, 4, 7, 6); }

#ifdef __AVX2__

// Of all `values`, as `to_bytes` does it: four vectors become one of bytes, and quads of these are added up at once.
template <int64_t values, int parts>
inline void whole_to_bytes(int8_t* out, int32_t (&sums)[parts], const Float32* x, Vec inverse, int32_t zero) {
    // Packing puts each half of a register behind that of the other one.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), ones = _mm256_set1_epi16(1);
    alignas(32) int32_t quads[values / kQuad];
    for (int64_t half = 0; half < values / (4 * kLanes); ++half) {
        __m256i rounded[4];
        for (int i = 0; i < 4; ++i) {
            const Vec value = load(x + (4 * half + i) * kLanes, All{}) * inverse;
            rounded[i] = _mm256_sub_epi32(_mm256_cvtps_epi32(reinterpret_cast<__m256>(value)), _mm256_set1_epi32(zero));
        }
        const __m256i low = _mm256_packs_epi32(rounded[0], rounded[1]), high = _mm256_packs_epi32(rounded[2], rounded[3]);
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + half, bytes);
        const __m256i totals = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), ones);
        _mm256_store_si256(reinterpret_cast<__m256i*>(quads) + half, totals);
    }
    constexpr int kQuads = values / kQuad / parts;
    for (int part = 0; part < parts; ++part) {
        sums[part] = 0;
        for (int i = 0; i < kQuads; ++i) sums[part] += quads[part * kQuads + i];
    }
}

#endif

// Rounds values times `factor` to integers, which less `zero` must fit into 8 bits, and adds up what each part comes to.
template <int64_t values, int parts>
inline void to_bytes(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size, float factor, int32_t zero = 0) {
    const Vec inverse = splat(factor);
#ifdef __AVX2__
    if (size == values) return whole_to_bytes<values>(out, sums, x, inverse, zero);
#endif
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = part * (values / parts);
        Ints total = {};
        for_each_vector(smaller_of(size - begin, values / parts), [&](int64_t i, auto lanes) {
            // Adding 1.5 * 2^23 leaves the rounded value in the low bits.
            const Vec shifted = load(x + begin + i, lanes) * inverse + 12582912.0f;
            const Ints rounded = reinterpret_cast<Ints>(shifted) - (0x4b400000 + zero);
            const Bytes bytes = __builtin_convertvector(rounded, Bytes);
            __builtin_memcpy(out + begin + i, &bytes, sizeof bytes);
            total = total + rounded;
        });
        sums[part] = static_cast<int32_t>(sum(__builtin_convertvector(total, Vec)));  // exact: far below 2^24
    }
}

// Rounds in a step that is given. The scale is 1; NaN if a value is none.
template <int64_t values, int parts>
inline Affine round_in_steps(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size, const Rounding& how,
                            const Step& step) {
    alignas(64) Float32 codes[values] = {};
    Vec poison = {};
    for_each_vector(size, [&](int64_t i, auto lanes) {
        const Vec v = in_steps(load(x + i, lanes), how, step);
        poison = poison + v * 0.0f;
        store(codes + i, v == v ? v : Vec{}, lanes);
    });
    to_bytes<values>(out, sums, codes, values, 1.0f);
    return {sum(poison) == 0.0f ? 1.0f : __builtin_nanf(""), 0};
}

// All parts are 0; the scale is NaN where a value is not finite.
template <int64_t values, int parts>
inline Affine nothing(int8_t* out, int32_t (&sums)[parts], bool is_finite) {
    for (int32_t& of_part : sums) of_part = 0;
    __builtin_memset(out, 0, values);
    return {is_finite ? 0.0f : __builtin_nanf(""), 0};
}

// Rounds to steps that span the values and 0.
template <int64_t values, int parts>
inline Affine round_range(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size) {
    const Range range = range_of(x, size);
    const Affine steps = spanning(range.low, range.high);
    if (!range.is_finite || !(steps.scale >= kActivationMin)) return nothing<values>(out, sums, range.is_finite);
    alignas(64) Float32 padded[values] = {};
    for (int64_t i = 0; size < values && i < size; ++i) padded[i] = x[i];
    to_bytes<values>(out, sums, size < values ? padded : x, values, steps.inverse(), steps.zero);
    return steps;
}

// Rounds to steps of the largest magnitude / 127, or that of a pair, and adds up what each part comes to. The scale is NaN if
// a value is not finite.
template <Span span, int64_t values, int parts>
inline Affine round_some(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size) {
    Vec most = {}, poison = {};
    for_each_vector(size, [&](int64_t i, auto lanes) {
        const Vec v = load(x + i, lanes);
        const Vec magnitude = as_floats(as_bits(v) & 0x7fffffff);
        most = larger(most, span == Span::kPair ? magnitude + swapped(magnitude) : magnitude);
        poison = poison + v * 0.0f;
    });
    const bool is_finite = sum(poison) == 0.0f;
    const float extreme = largest(most);
    if (!is_finite || extreme < kActivationMin) return nothing<values>(out, sums, is_finite);
    if (size < values) __builtin_memset(out, 0, values);
    to_bytes<values>(out, sums, x, size, kActivationMax / extreme);
    return {extreme / kActivationMax, 0};
}

#ifdef __AVX512F__

// Adds up what each of so many parts of some bytes comes to.
template <int64_t values, int parts>
inline void add_parts(int32_t (&sums)[parts], const int8_t* bytes) {
    constexpr int kQuads = values / kQuad / parts;
    for (int part = 0; part < parts; ++part) {
        const __m128i ones = _mm_set1_epi8(1);
        __m128i quads = _mm_setzero_si128();
        for (int i = 0; i < kQuads; i += 4) {
            const int8_t* from = bytes + (part * kQuads + i) * kQuad;
            quads = _mm_dpbusd_epi32(quads, ones, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        }
        quads = _mm_add_epi32(quads, _mm_shuffle_epi32(quads, 0x4e));
        sums[part] = _mm_cvtsi128_si32(_mm_add_epi32(quads, _mm_shuffle_epi32(quads, 0xb1)));
    }
}

// All `values`, which stay in registers.
template <Span span, int64_t values, int parts>
inline Affine round_whole(int8_t* out, int32_t (&sums)[parts], const Float32* x) {
    constexpr int kVectors = values / 16, kNotFinite = 0x99;
    __m512 v[kVectors], least = _mm512_setzero_ps(), most = least;
    int poison = 0;
    for (int i = 0; i < kVectors; ++i) {
        v[i] = load16(x + 16 * i).all;
        const __m512 size = span == Span::kRange ? v[i] : _mm512_abs_ps(v[i]);
        most = _mm512_max_ps(most, span == Span::kPair ? _mm512_add_ps(size, _mm512_permute_ps(size, 0xb1)) : size);
        if constexpr (span == Span::kRange) least = _mm512_min_ps(least, size);
        poison |= _mm512_fpclass_ps_mask(v[i], kNotFinite);
    }
    const float top = _mm512_reduce_max_ps(most);
    constexpr bool is_range = span == Span::kRange;
    const Affine steps = is_range ? spanning(_mm512_reduce_min_ps(least), top) : Affine{top / kActivationMax, 0};
    if (poison || !((is_range ? steps.scale : top) >= kActivationMin)) return nothing<values>(out, sums, poison == 0);
    const __m512 inverse = _mm512_set1_ps(is_range ? steps.inverse() : kActivationMax / top);
    for (int i = 0; i < kVectors; ++i) {
        __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
        if constexpr (is_range) rounded = _mm512_sub_epi32(rounded, _mm512_set1_epi32(steps.zero));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + i, _mm512_cvtepi32_epi8(rounded));
    }
    add_parts<values>(sums, out);
    return steps;
}

#endif

template <Span span, int64_t values, int parts>
inline Affine round_chunk(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size) {
#ifdef __AVX512F__
    if (size == values) return round_whole<span, values>(out, sums, x);
#endif
    if constexpr (span == Span::kRange) return round_range<values>(out, sums, x, size);
    else return round_some<span, values>(out, sums, x, size);
}

}}}  // namespace quire::QUIRE_ISA
