// Exact dot products of unsigned weights and signed 8-bit activations, for 16 outputs at once, a step of k at a time.
//
// All instruction sets make the same integers. A Dot names what a step of packed weights becomes in registers (Weights),
// what its products are summed in over a part of a chunk (Sum), how many k a part has (few enough that no sum overflows, and
// no more than share a scale of weights), and from how many tiles of rows on weights are unpacked once for all. A sum starts
// with the word that `start_word` makes of a part's activations: a factor times their sum, which takes the weights' zero
// point out at no cost.

#pragma once

#include "panels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Values of k that are summed as integers.
constexpr int64_t kInt4Part = 32, kInt8Part = kChunk;

// Most that the magnitudes of two activations, k and k + 1 with k even, come to where weights have eight bits.
constexpr int64_t kInt8Pair = 128;

constexpr int64_t kNever = INT64_MAX;

inline int32_t sum_of(const int8_t* values, int64_t count) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += values[i];
    return sum;
}

#if defined(__AVX512VNNI__)

struct Sums512 { __m512i all; };

inline __m512i dot_quads(__m512i sum, __m512i weights, const int32_t* x) {
    return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(*x));
}

struct Int8Dot {
    static constexpr int64_t kPart = kInt8Part;
    static constexpr int kQuads = 1;
    static constexpr int64_t kUnpackTiles = kNever;
    using Sum = Sums512;
    struct Weights { __m512i quads[kQuads]; };

    static Weights unpack(const uint8_t* step) { return {{_mm512_loadu_si512(step)}}; }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) { sum.all = dot_quads(sum.all, w.quads[quad], x); }
    static int32_t start_word(const int8_t* values, int32_t factor) { return factor * sum_of(values, kPart); }
    static Sum start(int32_t word) { return {_mm512_set1_epi32(word)}; }
    static Ints16 total(const Sum& sum) { return {sum.all}; }
};

struct Int4Dot {
    static constexpr int64_t kPart = kInt4Part;
    static constexpr int kQuads = 2;
    static constexpr int64_t kUnpackTiles = kNever;
    using Sum = Sums512;
    struct Weights { __m512i quads[kQuads]; };

    static Weights unpack(const uint8_t* step) {
        const __m512i bytes = _mm512_loadu_si512(step), low = _mm512_set1_epi8(15);
        return {{_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low)}};
    }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) { sum.all = dot_quads(sum.all, w.quads[quad], x); }
    static int32_t start_word(const int8_t* values, int32_t factor) { return factor * sum_of(values, kPart); }
    static Sum start(int32_t word) { return {_mm512_set1_epi32(word)}; }
    static Ints16 total(const Sum& sum) { return {sum.all}; }
};

#elif defined(__AVX2__)

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

#else

struct SumsOfArrays { int32_t lanes[kPanel]; };

inline void dot_quads(SumsOfArrays& sum, const uint8_t* weights, const int32_t* x) {
    int8_t quad[kQuad];
    __builtin_memcpy(quad, x, sizeof quad);
    for (int64_t j = 0; j < kPanel; ++j) {
        for (int64_t i = 0; i < kQuad; ++i) sum.lanes[j] += int32_t{weights[j * kQuad + i]} * quad[i];
    }
}

inline SumsOfArrays start_of(int32_t word) {
    SumsOfArrays sum;
    for (int32_t& lane : sum.lanes) lane = word;
    return sum;
}

inline Ints16 total_of(const SumsOfArrays& sum) {
    Ints16 total;
    __builtin_memcpy(&total.low, sum.lanes, sizeof total.low);
    __builtin_memcpy(&total.high, sum.lanes + kLanes, sizeof total.high);
    return total;
}

struct Int8Dot {
    static constexpr int64_t kPart = kInt8Part;
    static constexpr int kQuads = 1;
    static constexpr int64_t kUnpackTiles = kNever;
    using Sum = SumsOfArrays;
    struct Weights { uint8_t bytes[kStepBytes]; };

    static Weights unpack(const uint8_t* step) {
        Weights w;
        __builtin_memcpy(w.bytes, step, sizeof w.bytes);
        return w;
    }
    static void add(Sum& sum, const Weights& w, int, const int32_t* x) { dot_quads(sum, w.bytes, x); }
    static int32_t start_word(const int8_t* values, int32_t factor) { return factor * sum_of(values, kPart); }
    static Sum start(int32_t word) { return start_of(word); }
    static Ints16 total(const Sum& sum) { return total_of(sum); }
};

struct Int4Dot {
    static constexpr int64_t kPart = kInt4Part;
    static constexpr int kQuads = 2;
    static constexpr int64_t kUnpackTiles = 5;
    using Sum = SumsOfArrays;
    struct Weights { uint8_t bytes[kQuads][kStepBytes]; };

    static Weights unpack(const uint8_t* step) {
        Weights w;
        for (int64_t i = 0; i < kStepBytes; ++i) {
            w.bytes[0][i] = step[i] & 15;
            w.bytes[1][i] = step[i] >> 4;
        }
        return w;
    }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) { dot_quads(sum, w.bytes[quad], x); }
    static int32_t start_word(const int8_t* values, int32_t factor) { return factor * sum_of(values, kPart); }
    static Sum start(int32_t word) { return start_of(word); }
    static Ints16 total(const Sum& sum) { return total_of(sum); }
};

#endif

}}}  // namespace quire::QUIRE_ISA
