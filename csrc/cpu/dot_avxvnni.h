// SPDX-License-Identifier: Apache-2.0
// Dot products of AVX-VNNI, which processors without AVX-512 have: 32 products and their sums in one instruction.

#pragma once

#include "dot_six.h"

namespace quire { namespace QUIRE_ISA { namespace {

struct Dots256 {
    struct Quads { __m256i low, high; };
    struct Sum { Ints low, high; };  // of the type of what is summed, as in dot_avx512.h
    static constexpr int32_t kTaken = 0;

    static Quads bytes(const uint8_t* step) {
        const __m256i* halves = reinterpret_cast<const __m256i*>(step);
        return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
    }
    static Quads low(const uint8_t* step) {
        const Quads all = bytes(step);
        const __m256i nibble = _mm256_set1_epi8(15);
        return {_mm256_and_si256(all.low, nibble), _mm256_and_si256(all.high, nibble)};
    }
    static Quads high(const uint8_t* step) {
        const Quads all = bytes(step);
        const __m256i nibble = _mm256_set1_epi8(15);
        return {_mm256_and_si256(_mm256_srli_epi16(all.low, 4), nibble),
                _mm256_and_si256(_mm256_srli_epi16(all.high, 4), nibble)};
    }
    static Quads six(const uint8_t* step, int quad) {
        return {quire::QUIRE_ISA::six(step, quad), quire::QUIRE_ISA::six(step + kStepBytes / 2, quad)};
    }
    struct Book {
        __m256i bytes;
        explicit Book(int64_t format)
            : bytes(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(BookBytes(format).at)))) {}
    };
    static Quads looked_up(Quads codes, const Book& book) {
        return {_mm256_shuffle_epi8(book.bytes, codes.low), _mm256_shuffle_epi8(book.bytes, codes.high)};
    }
    static void add(Sum& sum, const Quads& weights, const int32_t* x) {
        const __m256i values = _mm256_set1_epi32(*x);
        sum.low = dot(sum.low, weights.low, values);
        sum.high = dot(sum.high, weights.high, values);
    }
    static Ints dot(Ints sum, __m256i weights, __m256i values) {
        return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum), weights, values));
    }
    static Sum start(int32_t word) { return {word + Ints{}, word + Ints{}}; }
    static Ints16 total(const Sum& sum) { return {sum.low, sum.high}; }
};

template <int64_t part>
using Int8Dot = Int8DotOf<Dots256, part>;
template <int64_t part>
using Int6Dot = Int6DotOf<Dots256, part, 4>;
template <int64_t part>
using Int4Dot = Int4DotOf<Dots256, part>;
template <int64_t part>
using BookDot = BookDotOf<Dots256, part>;

}}}  // namespace quire::QUIRE_ISA
