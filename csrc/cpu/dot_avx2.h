// SPDX-License-Identifier: Apache-2.0
// Dot products of AVX2: bytes are multiplied and neighbors added in 16 bits.

#pragma once

#include "dot_six.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Makes the compiler add in the order that is written: it would add pairs of products first, in more registers than there are.
inline __m256i in_turn(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}

// A quad's weights in registers.
struct QuadBytes { __m256i low, high; };

// Makes the compiler keep them there: those that are unpacked in memory it would load anew for each row.
inline QuadBytes kept(QuadBytes quad) {
    asm("" : "+x"(quad.low), "+x"(quad.high));
    return quad;
}

inline __m256i load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Bytes whose products with pairs of activations fit the 16 bits that they are added in, because these are at most kInt8Pair.
template <int64_t part, int quads>
struct ByteDot : QuadWord {
    static constexpr int64_t kPart = part, kBytes = kStepBytes;
    static constexpr int kQuads = quads;
    struct Sum { __m256i low, high; };
    struct Weights { __m256i low[kQuads], high[kQuads]; };

    static_assert(255 * kInt8Pair <= INT16_MAX, "no saturation");

    static __m256i sums_of(__m256i weights, __m256i values) {
        return _mm256_madd_epi16(_mm256_maddubs_epi16(weights, values), _mm256_set1_epi16(1));
    }
    static QuadBytes quad(const Weights& w, int quad) { return {w.low[quad], w.high[quad]}; }
    static QuadBytes kept(const Weights& w, int at) { return quire::QUIRE_ISA::kept(quad(w, at)); }
    static void add(Sum& sum, const QuadBytes& w, const int32_t* x) {
        const __m256i values = _mm256_set1_epi32(*x);
        sum.low = in_turn(_mm256_add_epi32(sum.low, sums_of(w.low, values)));
        sum.high = in_turn(_mm256_add_epi32(sum.high, sums_of(w.high, values)));
    }
    static int32_t start_word(const int8_t*, int32_t sum, int32_t factor) { return factor * sum; }
    static Sum start(int32_t word) { return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)}; }
    static Ints16 total(const Sum& sum) { return {reinterpret_cast<Ints>(sum.low), reinterpret_cast<Ints>(sum.high)}; }
};

// Bytes by integers of some more bits than 8: both as integers of 16 bits, those at even places and those at odd ones.
template <int64_t part>
struct Int8Dot {
    static constexpr int64_t kPart = part, kBytes = kStepBytes;
    static constexpr int kQuads = 1, kTogether = 1, kWords = 2;
    static constexpr bool kTakesPoints = true;
    static constexpr int64_t kUnpackTiles = 4;
    using Book = NoBook;
    struct Sum { __m256i low, high; };
    struct Weights { __m256i low[2], high[2]; };

    static Weights unpack(const uint8_t* step, Book) {
        const __m256i low = load_ints(step), high = load_ints(step + 32), byte = _mm256_set1_epi16(255);
        return {{_mm256_and_si256(low, byte), _mm256_srli_epi16(low, 8)},
                {_mm256_and_si256(high, byte), _mm256_srli_epi16(high, 8)}};
    }
    static const Weights& quad(const Weights& w, int) { return w; }
    static Weights kept(Weights w, int) {
        asm("" : "+x"(w.low[0]), "+x"(w.low[1]), "+x"(w.high[0]), "+x"(w.high[1]));
        return w;
    }
    template <int64_t values>
    static void put(int32_t* out, int64_t stride, const int8_t* rounded, int32_t zero) {
        static_assert(values % 16 == 0, "four quads at once");
        // Of each quad the first and third, then the others.
        const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
                                               0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
        for (int64_t k = 0; k < values; k += 16, out += 4 * stride) {
            const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rounded + k)));
            const __m256i whole = _mm256_add_epi16(words, _mm256_set1_epi16(static_cast<int16_t>(zero)));
            const __m256i quads = _mm256_shuffle_epi8(whole, order);
            const __m128i low = _mm256_castsi256_si128(quads), high = _mm256_extracti128_si256(quads, 1);
            _mm_storel_epi64(reinterpret_cast<__m128i*>(out), low);
            _mm_storel_epi64(reinterpret_cast<__m128i*>(out + stride), _mm_unpackhi_epi64(low, low));
            _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 2 * stride), high);
            _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 3 * stride), _mm_unpackhi_epi64(high, high));
        }
    }
    static void add(Sum& sum, const Weights& w, const int32_t* x) {
        const __m256i even = _mm256_set1_epi32(x[0]), odd = _mm256_set1_epi32(x[1]);
        sum.low = in_turn(_mm256_add_epi32(sum.low, products(w.low, even, odd)));
        sum.high = in_turn(_mm256_add_epi32(sum.high, products(w.high, even, odd)));
    }
    static int32_t start_word(const int8_t*, int32_t sum, int32_t factor) { return factor * sum; }
    static Sum start(int32_t word) { return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)}; }
    static Ints16 total(const Sum& sum) { return {reinterpret_cast<Ints>(sum.low), reinterpret_cast<Ints>(sum.high)}; }

private:
    static __m256i products(const __m256i (&weights)[2], __m256i even, __m256i odd) {
        return _mm256_add_epi32(_mm256_madd_epi16(weights[0], even), _mm256_madd_epi16(weights[1], odd));
    }
};

// Codes of 6 bits: the products of two quads are added in 16 bits before they are in 32.
template <int64_t part>
struct Int6Dot : QuadWord {
    static constexpr int64_t kPart = part, kBytes = kSixBytes, kUnpackTiles = 4;
    static constexpr int kQuads = kSixQuads, kTogether = 2;
    using Book = NoBook;
    struct Sum { __m256i low, high; };
    struct Weights { __m256i low[kQuads], high[kQuads]; };
    struct Pair { __m256i low[2], high[2]; };

    static_assert(2 * 2 * 63 * 128 <= INT16_MAX, "no saturation");

    static Weights unpack(const uint8_t* step, Book) {
        Weights w;
        for (int quad = 0; quad < kQuads; ++quad) w.low[quad] = six(step, quad), w.high[quad] = six(step + 32, quad);
        return w;
    }
    static Pair quad(const PackedStep& step, int at) {
        return {{six(step.at, at), six(step.at, at + 1)}, {six(step.at + 32, at), six(step.at + 32, at + 1)}};
    }
    static Pair kept(const Weights& w, int at) {
        Pair pair = {{w.low[at], w.low[at + 1]}, {w.high[at], w.high[at + 1]}};
        asm("" : "+x"(pair.low[0]), "+x"(pair.low[1]), "+x"(pair.high[0]), "+x"(pair.high[1]));
        return pair;
    }
    static void add(Sum& sum, const Pair& w, const int32_t* x, const int32_t* next) {
        const __m256i first = _mm256_set1_epi32(*x), second = _mm256_set1_epi32(*next);
        sum.low = in_turn(_mm256_add_epi32(sum.low, products(w.low, first, second)));
        sum.high = in_turn(_mm256_add_epi32(sum.high, products(w.high, first, second)));
    }
    static int32_t start_word(const int8_t*, int32_t sum, int32_t factor) { return factor * sum; }
    static Sum start(int32_t word) { return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)}; }
    static Ints16 total(const Sum& sum) { return {reinterpret_cast<Ints>(sum.low), reinterpret_cast<Ints>(sum.high)}; }

private:
    static __m256i products(const __m256i (&w)[2], __m256i first, __m256i second) {
        const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(w[0], first), _mm256_maddubs_epi16(w[1], second));
        return _mm256_madd_epi16(both, _mm256_set1_epi16(1));
    }
};

inline __m256i low_nibbles(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline __m256i high_nibbles(__m256i bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }

template <int64_t part>
struct BookDot : ByteDot<part, 2> {
    static constexpr int64_t kUnpackTiles = 5;
    using Weights = typename ByteDot<part, 2>::Weights;
    struct Book {
        __m256i bytes;
        explicit Book(int64_t format)
            : bytes(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(BookBytes(format).at)))) {}
    };

    static Weights unpack(const uint8_t* step, const Book& book) {
        const __m256i low = load_ints(step), high = load_ints(step + 32), bytes = book.bytes;
        return {{_mm256_shuffle_epi8(bytes, low_nibbles(low)), _mm256_shuffle_epi8(bytes, high_nibbles(low))},
                {_mm256_shuffle_epi8(bytes, low_nibbles(high)), _mm256_shuffle_epi8(bytes, high_nibbles(high))}};
    }
};

// Sums stay in 16 bits for a part: at most 8 quads of 2 * 15 * 127 for each of two lanes.
template <int64_t part>
struct Int4Dot : QuadWord {
    static constexpr int64_t kPart = part, kBytes = kStepBytes;
    static constexpr int kQuads = 2;
    static constexpr int64_t kUnpackTiles = 4;
    using Book = NoBook;
    struct Sum { __m256i low, high; };
    struct Weights { __m256i low[kQuads], high[kQuads]; };

    static Weights unpack(const uint8_t* step, Book) {
        const __m256i low = load_ints(step), high = load_ints(step + 32);
        return {{low_nibbles(low), high_nibbles(low)}, {low_nibbles(high), high_nibbles(high)}};
    }
    static QuadBytes quad(const Weights& w, int quad) { return {w.low[quad], w.high[quad]}; }
    static QuadBytes kept(const Weights& w, int at) { return quire::QUIRE_ISA::kept(quad(w, at)); }
    static void add(Sum& sum, const QuadBytes& w, const int32_t* x) {
        const __m256i values = _mm256_set1_epi32(*x);
        sum.low = in_turn(_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(w.low, values)));
        sum.high = in_turn(_mm256_add_epi16(sum.high, _mm256_maddubs_epi16(w.high, values)));
    }
    // For each lane the sum over its own half of every quad.
    static int32_t start_word(const int8_t* values, int32_t, int32_t factor) {
        static_assert(kPart == 16 || kPart == 32, "sums fit into 16 bits");
        __m128i four = _mm_setzero_si128();
        for (int64_t k = 0; k < kPart; k += 16) {
            const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + k));
            four = _mm_add_epi16(four, _mm_maddubs_epi16(_mm_set1_epi8(1), sixteen));
        }
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
