// Dot products of AVX-512 with VNNI: 64 products and their sums in one instruction.

#pragma once

#include "dot_steps.h"

namespace quire { namespace QUIRE_ISA { namespace {

struct Dots512 {
    using Quads = __m512i;
    struct Sum { __m512i all; };
    static constexpr int32_t kTaken = 0;

    static Quads bytes(const uint8_t* step) { return _mm512_loadu_si512(step); }
    static Quads low(const uint8_t* step) { return _mm512_and_si512(bytes(step), _mm512_set1_epi8(15)); }
    static Quads high(const uint8_t* step) {
        return _mm512_and_si512(_mm512_srli_epi16(bytes(step), 4), _mm512_set1_epi8(15));
    }
    static void add(Sum& sum, Quads weights, const int32_t* x) {
        sum.all = _mm512_dpbusd_epi32(sum.all, weights, _mm512_set1_epi32(*x));
    }
    static Sum start(int32_t word) { return {_mm512_set1_epi32(word)}; }
    static Ints16 total(const Sum& sum) { return {sum.all}; }
};

using Int8Dot = Int8DotOf<Dots512>;
using Int4Dot = Int4DotOf<Dots512>;

}}}  // namespace quire::QUIRE_ISA
