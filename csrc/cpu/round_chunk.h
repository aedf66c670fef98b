// Activations rounded to 8 bits, a chunk of k at a time, for products with integer weights.

#pragma once

#include "dot.h"
#include "panels.h"
#include "rounding.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr float kActivationMax = 127.0f;
static_assert(kInt8Pair > static_cast<int64_t>(kActivationMax), "rounding two values adds up to 1 to their sum");

// Activations below are 0: their scale's inverse would not be finite.
constexpr float kActivationMin = 1e-30f;

inline Vec swapped(Vec pairs) { return __builtin_shufflevector(pairs, pairs, 1, 0, 3, 2, 5, 4, 7, 6); }

#ifdef __AVX2__

// Of a whole chunk, as `to_bytes` does it: four vectors become one of bytes, and quads of these are added up at once.
template <int parts>
inline void whole_to_bytes(int8_t* out, int32_t (&sums)[parts], const Float32* x, Vec inverse) {
    // Packing puts each half of a register behind that of the other one.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), ones = _mm256_set1_epi16(1);
    alignas(32) int32_t quads[kChunk / kQuad];
    for (int half = 0; half < 2; ++half) {
        __m256i rounded[4];
        for (int i = 0; i < 4; ++i) {
            const Vec value = load(x + (4 * half + i) * kLanes, All{}) * inverse;
            rounded[i] = _mm256_cvtps_epi32(reinterpret_cast<__m256>(value));
        }
        const __m256i low = _mm256_packs_epi32(rounded[0], rounded[1]), high = _mm256_packs_epi32(rounded[2], rounded[3]);
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + half, bytes);
        const __m256i totals = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), ones);
        _mm256_store_si256(reinterpret_cast<__m256i*>(quads) + half, totals);
    }
    constexpr int kQuads = kChunk / kQuad / parts;
    for (int part = 0; part < parts; ++part) {
        sums[part] = 0;
        for (int i = 0; i < kQuads; ++i) sums[part] += quads[part * kQuads + i];
    }
}

#endif

// Rounds values times `factor` to integers of 8 bits, in which they must fit, and adds up what each part comes to.
template <int parts>
inline void to_bytes(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size, float factor) {
    const Vec inverse = splat(factor);
#ifdef __AVX2__
    if (size == kChunk) return whole_to_bytes(out, sums, x, inverse);
#endif
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = part * (kChunk / parts);
        Ints total = {};
        for_each_vector(smaller_of(size - begin, kChunk / parts), [&](int64_t i, auto lanes) {
            // Adding 1.5 * 2^23 leaves the rounded value in the low bits.
            const Vec shifted = load(x + begin + i, lanes) * inverse + 12582912.0f;
            const Ints rounded = reinterpret_cast<Ints>(shifted) - 0x4b400000;
            const Bytes bytes = __builtin_convertvector(rounded, Bytes);
            __builtin_memcpy(out + begin + i, &bytes, sizeof bytes);
            total = total + rounded;
        });
        sums[part] = static_cast<int32_t>(sum(__builtin_convertvector(total, Vec)));  // exact: far below 2^24
    }
}

// Rounds in a step that is given. Returns 1; NaN if a value is none.
template <int parts>
inline float round_in_steps(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size, const Rounding& how,
                            const Step& step) {
    alignas(64) Float32 codes[kChunk] = {};
    Vec poison = {};
    for_each_vector(size, [&](int64_t i, auto lanes) {
        const Vec v = in_steps(load(x + i, lanes), how, step);
        poison = poison + v * 0.0f;
        store(codes + i, v == v ? v : Vec{}, lanes);
    });
    to_bytes(out, sums, codes, kChunk, 1.0f);
    return sum(poison) == 0.0f ? 1.0f : __builtin_nanf("");
}

// Rounds to steps of the largest magnitude / 127, or that of a pair, and adds up what each part comes to. Returns the
// scale; NaN if a value is not finite.
template <bool pairs, int parts>
inline float round_some(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size) {
    Vec most = {}, poison = {};
    for_each_vector(size, [&](int64_t i, auto lanes) {
        const Vec v = load(x + i, lanes);
        const Vec magnitude = as_floats(as_bits(v) & 0x7fffffff);
        most = larger(most, pairs ? magnitude + swapped(magnitude) : magnitude);
        poison = poison + v * 0.0f;
    });
    const bool is_finite = sum(poison) == 0.0f;
    const float extreme = largest(most);
    const bool is_nothing = !is_finite || extreme < kActivationMin;
    if (is_nothing || size < kChunk) __builtin_memset(out, 0, kChunk);
    if (is_nothing) return is_finite ? 0.0f : __builtin_nanf("");
    to_bytes(out, sums, x, size, kActivationMax / extreme);
    return extreme / kActivationMax;
}

#ifdef __AVX512F__

// A whole chunk, which stays in registers.
template <bool pairs, int parts>
inline float round_whole(int8_t* out, int32_t (&sums)[parts], const Float32* x) {
    constexpr int kVectors = kChunk / 16, kNotFinite = 0x99;
    __m512 v[kVectors], most = _mm512_setzero_ps();
    int poison = 0;
    for (int i = 0; i < kVectors; ++i) {
        v[i] = load16(x + 16 * i).all;
        const __m512 magnitude = _mm512_abs_ps(v[i]);
        most = _mm512_max_ps(most, pairs ? _mm512_add_ps(magnitude, _mm512_permute_ps(magnitude, 0xb1)) : magnitude);
        poison |= _mm512_fpclass_ps_mask(v[i], kNotFinite);
    }
    const float extreme = _mm512_reduce_max_ps(most);
    if (poison || extreme < kActivationMin) {
        __builtin_memset(out, 0, kChunk);
        return poison ? __builtin_nanf("") : 0.0f;
    }
    const __m512 inverse = _mm512_set1_ps(kActivationMax / extreme);
    __m512i rounded[kVectors];
    for (int i = 0; i < kVectors; ++i) rounded[i] = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
    // Packing puts each quarter of a register behind that of the other one.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i low = _mm512_packs_epi32(rounded[0], rounded[1]), high = _mm512_packs_epi32(rounded[2], rounded[3]);
    const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    _mm512_storeu_si512(out, bytes);
    __m512i quads = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    quads = _mm512_add_epi32(quads, _mm512_shuffle_epi32(quads, _MM_PERM_CDAB));
    quads = _mm512_add_epi32(quads, _mm512_shuffle_epi32(quads, _MM_PERM_BADC));
    alignas(64) int32_t totals[16];
    _mm512_store_si512(totals, quads);
    for (int part = 0; part < parts; ++part) {
        sums[part] = 0;
        for (int i = 0; i < 4 / parts; ++i) sums[part] += totals[4 * (part * (4 / parts) + i)];
    }
    return extreme / kActivationMax;
}

#endif

template <bool pairs, int parts>
inline float round_chunk(int8_t* out, int32_t (&sums)[parts], const Float32* x, int64_t size) {
#ifdef __AVX512F__
    if (size == kChunk) return round_whole<pairs>(out, sums, x);
#endif
    return round_some<pairs>(out, sums, x, size);
}

}}}  // namespace quire::QUIRE_ISA
