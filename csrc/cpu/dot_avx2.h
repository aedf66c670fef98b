// Dot products of AVX2: bytes are multiplied and neighbours added in 16 bits.

#pragma once

#include "dot_steps.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Makes the compiler add in the order that is written: it would add pairs of products first, in more registers than there are.
inline __m256i in_turn(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}

inline __m256i load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Pairs of products fit the 16 bits that they are added in because pairs of activations are at most kInt8Pair.
struct Int8Dot {
    static constexpr int64_t kPart = kInt8Part;
    static constexpr int kQuads = 1;
    static constexpr int64_t kUnpackTiles = kNever;
    struct Sum { __m256i low, high; };
    struct Weights { __m256i low[kQuads], high[kQuads]; };

    static_assert(255 * kInt8Pair <= INT16_MAX, "no saturation");

    static Weights unpack(const uint8_t* step) { return {{load_ints(step)}, {load_ints(step + 32)}}; }
    static __m256i quads(__m256i weights, __m256i values) {
        return _mm256_madd_epi16(_mm256_maddubs_epi16(weights, values), _mm256_set1_epi16(1));
    }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) {
        const __m256i values = _mm256_set1_epi32(*x);
        sum.low = in_turn(_mm256_add_epi32(sum.low, quads(w.low[quad], values)));
        sum.high = in_turn(_mm256_add_epi32(sum.high, quads(w.high[quad], values)));
    }
    static int32_t start_word(const int8_t* values, int32_t factor) { return factor * sum_of(values, kPart); }
    static Sum start(int32_t word) { return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)}; }
    static Ints16 total(const Sum& sum) { return {reinterpret_cast<Ints>(sum.low), reinterpret_cast<Ints>(sum.high)}; }
};

// Sums stay in 16 bits for a part: 8 quads of at most 2 * 15 * 127 for each of two lanes.
struct Int4Dot {
    static constexpr int64_t kPart = kInt4Part;
    static constexpr int kQuads = 2;
    static constexpr int64_t kUnpackTiles = 5;
    struct Sum { __m256i low, high; };
    struct Weights { __m256i low[kQuads], high[kQuads]; };

    static Weights unpack(const uint8_t* step) {
        const __m256i low = load_ints(step), high = load_ints(step + 32), nibble = _mm256_set1_epi8(15);
        return {{_mm256_and_si256(low, nibble), _mm256_and_si256(_mm256_srli_epi16(low, 4), nibble)},
                {_mm256_and_si256(high, nibble), _mm256_and_si256(_mm256_srli_epi16(high, 4), nibble)}};
    }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) {
        const __m256i values = _mm256_set1_epi32(*x);
        sum.low = in_turn(_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(w.low[quad], values)));
        sum.high = in_turn(_mm256_add_epi16(sum.high, _mm256_maddubs_epi16(w.high[quad], values)));
    }
    // For each lane the sum over its own half of every quad.
    static int32_t start_word(const int8_t* values, int32_t factor) {
        static_assert(kPart == 32, "a register");
        const __m256i eight = _mm256_maddubs_epi16(_mm256_set1_epi8(1), load_ints(values));
        const __m128i four = _mm_add_epi16(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
        const __m128i two = _mm_add_epi16(four, _mm_srli_si128(four, 8)), one = _mm_add_epi16(two, _mm_srli_si128(two, 4));
        return _mm_cvtsi128_si32(_mm_mullo_epi16(one, _mm_set1_epi16(static_cast<int16_t>(factor))));
    }
    static Sum start(int32_t word) { return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)}; }
    static Ints16 total(const Sum& sum) {
        const __m256i ones = _mm256_set1_epi16(1);
        return {reinterpret_cast<Ints>(_mm256_madd_epi16(sum.low, ones)),
                reinterpret_cast<Ints>(_mm256_madd_epi16(sum.high, ones))};
    }
};

}}}  // namespace quire::QUIRE_ISA
