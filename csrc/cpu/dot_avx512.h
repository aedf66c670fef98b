// SPDX-License-Identifier: Apache-2.0
// Dot products of AVX-512 with VNNI: 64 products and their sums in one instruction.

#pragma once

#include "dot_steps.h"

namespace quire { namespace QUIRE_ISA { namespace {

struct Dots512 {
    using Quads = __m512i;
    // Of the type of what is summed: sums of another one are stored with every step (GCC 12).
    typedef int32_t Words __attribute__((vector_size(64)));
    struct Sum { Words all; };
    static constexpr int32_t kTaken = 0;

    static Quads bytes(const uint8_t* step) { return _mm512_loadu_si512(step); }
    static Quads low(const uint8_t* step) { return _mm512_and_si512(bytes(step), _mm512_set1_epi8(15)); }
    static Quads high(const uint8_t* step) {
        return _mm512_and_si512(_mm512_srli_epi16(bytes(step), 4), _mm512_set1_epi8(15));
    }
    static Quads six(const uint8_t* step, int quad) {
        const Quads four = bytes(step + quad / 2 * kStepBytes), two = bytes(step + 2 * kStepBytes);
        const Quads low = quad % 2 ? _mm512_srli_epi16(four, 4) : four;
        const auto count = static_cast<unsigned>(quad < 2 ? 4 - 2 * quad : 2 * quad - 4);
        const Quads high = quad < 2 ? _mm512_slli_epi16(two, count) : _mm512_srli_epi16(two, count);
        // Bits of the first where the second has ones, and all of the third.
        return _mm512_ternarylogic_epi32(low, _mm512_set1_epi8(15), _mm512_and_si512(high, _mm512_set1_epi8(48)), 0xea);
    }
    struct Book {
        __m512i bytes;
        explicit Book(int64_t format)
            : bytes(_mm512_maskz_broadcast_i32x4(0xffff, _mm_load_si128(reinterpret_cast<const __m128i*>(BookBytes(format).at)))) {}
    };
    static Quads looked_up(Quads codes, const Book& book) { return _mm512_shuffle_epi8(book.bytes, codes); }
    static void add(Sum& sum, Quads weights, const int32_t* x) {
        const __m512i before = reinterpret_cast<__m512i>(sum.all);
        sum.all = reinterpret_cast<Words>(_mm512_dpbusd_epi32(before, weights, _mm512_set1_epi32(*x)));
    }
    static Sum start(int32_t word) { return {reinterpret_cast<Words>(_mm512_set1_epi32(word))}; }
    static Ints16 total(const Sum& sum) { return {reinterpret_cast<__m512i>(sum.all)}; }
};

template <int64_t part>
using Int8Dot = Int8DotOf<Dots512, part>;
template <int64_t part>
using Int6Dot = Int6DotOf<Dots512, part, 4>;
template <int64_t part>
using Int4Dot = Int4DotOf<Dots512, part>;
template <int64_t part>
using BookDot = BookDotOf<Dots512, part>;

}}}  // namespace quire::QUIRE_ISA
