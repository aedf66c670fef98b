// Exact dot products of unsigned weights and signed 8-bit activations, for 16 outputs at once, a step of k at a time.
//
// All instruction sets make the same integers. A Dot names what a step of packed weights becomes in registers (Weights),
// what its products are summed in over a chunk (Sum), how activations of a quad lie for it (`encode`, kWords words), how many
// k a chunk has (few enough that no sum overflows), and from how many tiles of rows on weights are unpacked once for all.

#pragma once

#include "panels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Values of k that share a scale of activations, and are summed as integers.
constexpr int64_t kInt4Chunk = 32, kInt8Chunk = 64;

constexpr int64_t kNever = INT64_MAX;

inline void copy_quad(const int8_t* quad, int32_t* words) { __builtin_memcpy(words, quad, kQuad); }

#if defined(__AVX512VNNI__)

struct Sums512 { __m512i all; };

inline __m512i dot_quads(__m512i sum, __m512i weights, const int32_t* x) {
    return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(*x));
}

struct Int8Dot {
    static constexpr int64_t kChunk = kInt8Chunk;
    static constexpr int kQuads = 1, kWords = 1;
    static constexpr int64_t kUnpackTiles = kNever;
    using Sum = Sums512;
    struct Weights { __m512i quads[kQuads]; };

    static Weights unpack(const uint8_t* step) { return {{_mm512_loadu_si512(step)}}; }
    static void encode(const int8_t* quad, int32_t* words) { copy_quad(quad, words); }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) { sum.all = dot_quads(sum.all, w.quads[quad], x); }
    static Ints16 total(const Sum& sum) { return {sum.all}; }
};

struct Int4Dot {
    static constexpr int64_t kChunk = kInt4Chunk;
    static constexpr int kQuads = 2, kWords = 1;
    static constexpr int64_t kUnpackTiles = kNever;
    using Sum = Sums512;
    struct Weights { __m512i quads[kQuads]; };

    static Weights unpack(const uint8_t* step) {
        const __m512i bytes = _mm512_loadu_si512(step), low = _mm512_set1_epi8(15);
        return {{_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low)}};
    }
    static void encode(const int8_t* quad, int32_t* words) { copy_quad(quad, words); }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) { sum.all = dot_quads(sum.all, w.quads[quad], x); }
    static Ints16 total(const Sum& sum) { return {sum.all}; }
};

#elif defined(__AVX2__)

// Makes the compiler add in the order that is written: it would add pairs of products first, in more registers than there are.
inline __m256i in_turn(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}

inline __m256i load_ints(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Bytes times bytes do not fit the 16 bits that AVX2 adds pairs of them in. As 16-bit integers they do: the even and the
// odd bytes of each quad.
struct Int8Dot {
    static constexpr int64_t kChunk = kInt8Chunk;
    static constexpr int kQuads = 1, kWords = 2;
    static constexpr int64_t kUnpackTiles = 5;
    struct Sum { __m256i low, high; };
    struct Weights { __m256i even[2], odd[2]; };

    static Weights unpack(const uint8_t* step) {
        const __m256i low = load_ints(step), high = load_ints(step + 32), bytes = _mm256_set1_epi16(255);
        return {{_mm256_and_si256(low, bytes), _mm256_and_si256(high, bytes)},
                {_mm256_srli_epi16(low, 8), _mm256_srli_epi16(high, 8)}};
    }
    static void encode(const int8_t* quad, int32_t* words) {
        words[0] = (quad[0] & 0xffff) | quad[2] * 65536;
        words[1] = (quad[1] & 0xffff) | quad[3] * 65536;
    }
    static void add(Sum& sum, const Weights& w, int, const int32_t* x) {
        const __m256i even = _mm256_set1_epi32(x[0]), odd = _mm256_set1_epi32(x[1]);
        sum.low = in_turn(_mm256_add_epi32(sum.low, _mm256_madd_epi16(w.even[0], even)));
        sum.high = in_turn(_mm256_add_epi32(sum.high, _mm256_madd_epi16(w.even[1], even)));
        sum.low = in_turn(_mm256_add_epi32(sum.low, _mm256_madd_epi16(w.odd[0], odd)));
        sum.high = in_turn(_mm256_add_epi32(sum.high, _mm256_madd_epi16(w.odd[1], odd)));
    }
    static Ints16 total(const Sum& sum) { return {reinterpret_cast<Ints>(sum.low), reinterpret_cast<Ints>(sum.high)}; }
};

// Sums stay in 16 bits for a chunk: 8 quads of at most 2 * 15 * 127 for each of two lanes.
struct Int4Dot {
    static constexpr int64_t kChunk = kInt4Chunk;
    static constexpr int kQuads = 2, kWords = 1;
    static constexpr int64_t kUnpackTiles = 5;
    struct Sum { __m256i low, high; };
    struct Weights { __m256i low[kQuads], high[kQuads]; };

    static Weights unpack(const uint8_t* step) {
        const __m256i low = load_ints(step), high = load_ints(step + 32), nibble = _mm256_set1_epi8(15);
        return {{_mm256_and_si256(low, nibble), _mm256_and_si256(_mm256_srli_epi16(low, 4), nibble)},
                {_mm256_and_si256(high, nibble), _mm256_and_si256(_mm256_srli_epi16(high, 4), nibble)}};
    }
    static void encode(const int8_t* quad, int32_t* words) { copy_quad(quad, words); }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) {
        const __m256i values = _mm256_set1_epi32(*x);
        sum.low = in_turn(_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(w.low[quad], values)));
        sum.high = in_turn(_mm256_add_epi16(sum.high, _mm256_maddubs_epi16(w.high[quad], values)));
    }
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

inline Ints16 total_of(const SumsOfArrays& sum) {
    Ints16 total;
    __builtin_memcpy(&total.low, sum.lanes, sizeof total.low);
    __builtin_memcpy(&total.high, sum.lanes + kLanes, sizeof total.high);
    return total;
}

struct Int8Dot {
    static constexpr int64_t kChunk = kInt8Chunk;
    static constexpr int kQuads = 1, kWords = 1;
    static constexpr int64_t kUnpackTiles = 5;
    using Sum = SumsOfArrays;
    struct Weights { uint8_t bytes[kStepBytes]; };

    static Weights unpack(const uint8_t* step) {
        Weights w;
        __builtin_memcpy(w.bytes, step, sizeof w.bytes);
        return w;
    }
    static void encode(const int8_t* quad, int32_t* words) { copy_quad(quad, words); }
    static void add(Sum& sum, const Weights& w, int, const int32_t* x) { dot_quads(sum, w.bytes, x); }
    static Ints16 total(const Sum& sum) { return total_of(sum); }
};

struct Int4Dot {
    static constexpr int64_t kChunk = kInt4Chunk;
    static constexpr int kQuads = 2, kWords = 1;
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
    static void encode(const int8_t* quad, int32_t* words) { copy_quad(quad, words); }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) { dot_quads(sum, w.bytes[quad], x); }
    static Ints16 total(const Sum& sum) { return total_of(sum); }
};

#endif

}}}  // namespace quire::QUIRE_ISA
