// SPDX-License-Identifier: Apache-2.0
// What codes of packed weights stand for, as floats: in the precise mode and where rows are looked up.

#pragma once

#include "books.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Codes of a whole number in a byte: a step, and one of them.
template <int64_t per_byte>
struct ByteSteps {
    static constexpr int64_t kInputs = kQuad * per_byte, kBytes = kStepBytes;

    static Ints16 step(const uint8_t* at) { return load_words(at); }
    static uint8_t code(const uint8_t* panel, int64_t k, int64_t lane) {
        const uint8_t byte = panel[byte_of(k, lane, per_byte)];
        return per_byte == 1 ? byte : byte >> shift_of(k) & 15;
    }
};

// What codes stand for: sixteen of the i-th k of a step; and one.
struct Int8Values : ByteSteps<1> {
    int32_t zero;

    explicit Int8Values(int32_t zero) : zero(zero) {}
    Lanes16 at(Ints16 step, int64_t i) const { return to_floats(bits_of(step, i * 8, 255) - splat16(zero)); }
    float of(uint8_t code) const { return static_cast<float>(code - zero); }
};

// Where the nibble of the i-th k of a step is in its output's word.
constexpr int64_t nibble_shift(int64_t i) { return i % kQuad * 8 + shift_of(i); }

struct Int4Values : ByteSteps<2> {
    int32_t zero;

    explicit Int4Values(int32_t zero) : zero(zero) {}
    Lanes16 at(Ints16 step, int64_t i) const { return to_floats(bits_of(step, nibble_shift(i), 15) - splat16(zero)); }
    float of(uint8_t code) const { return static_cast<float>(code - zero); }
};

struct Int6Values {
    static constexpr int64_t kInputs = kSixQuads * kQuad, kBytes = kSixBytes;
    struct Step { Ints16 low[2], high; };

    static Step step(const uint8_t* at) {
        return {{load_words(at), load_words(at + kStepBytes)}, load_words(at + 2 * kStepBytes)};
    }
    static uint8_t code(const uint8_t* panel, int64_t k, int64_t lane) {
        const uint8_t* at = panel + k / kInputs * kBytes + lane * kQuad + k % kQuad;
        const int64_t quad = k / kQuad % kSixQuads;
        const int low = at[quad / 2 * kStepBytes] >> shift_of(k) & 15, high = at[2 * kStepBytes] >> 2 * quad & 3;
        return static_cast<uint8_t>(low | high << 4);
    }
    Lanes16 at(const Step& step, int64_t i) const {
        const int64_t quad = i / kQuad;
        const Ints16 high = bits_of(step.high, i % kQuad * 8 + 2 * quad, 3) * splat16(-16);
        return to_floats(bits_of(step.low[quad / 2], nibble_shift(i), 15) - (high - splat16(-kInt6Zero)));
    }
    float of(uint8_t code) const { return static_cast<float>(code - kInt6Zero); }
};

// E4M3 has an exponent of 4 bits and a mantissa of 3: at the place of a float16's they are 2^8 times too small, subnormal
// numbers included. It has no infinities, and one NaN.
struct Fp8Values : ByteSteps<1> {
    static constexpr float kStep = 256.0f;

    static uint16_t half_of(uint32_t code) {
        const uint32_t magnitude = code & 0x7f, nan = (magnitude + 1) >> 7;
        return static_cast<uint16_t>((code & 0x80) << 8 | magnitude << 7 | nan * 0x7e00);
    }
    Lanes16 at(Ints16 step, int64_t i) const {
        const Ints16 codes = bits_of(step, i * 8, 255);
#ifdef __AVX512F__
        const __m512i magnitude = _mm512_and_si512(codes.all, _mm512_set1_epi32(0x7f));
        const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(codes.all, _mm512_set1_epi32(0x80)), 8);
        const __m512i halves = _mm512_or_si512(sign, _mm512_slli_epi32(magnitude, 7));
        const __mmask16 nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
        const __m512i all = _mm512_mask_mov_epi32(halves, nan, _mm512_set1_epi32(0x7e00));
        return Lanes16{_mm512_cvtph_ps(_mm512_cvtepi32_epi16(all))} * splat16(kStep);
#else
        uint32_t words[kPanel];
        Float16 halves[kPanel];
        __builtin_memcpy(words, &codes, sizeof words);
        for (int64_t j = 0; j < kPanel; ++j) halves[j].bits = half_of(words[j]);
        return load16(halves) * splat16(kStep);
#endif
    }
    float of(uint8_t code) const { return to_float(Float16{half_of(code)}) * kStep; }
};

struct BookValues : ByteSteps<2> {
    const Float32* book;

    explicit BookValues(const Float32* book) : book(book) {}
    Lanes16 at(Ints16 step, int64_t i) const {
        const Ints16 codes = bits_of(step, nibble_shift(i), 15);
#ifdef __AVX512F__
        return {_mm512_permutexvar_ps(codes.all, load16(book).all)};
#else
        uint32_t words[kPanel];
        Float32 values[kPanel];
        __builtin_memcpy(words, &codes, sizeof words);
        for (int64_t j = 0; j < kPanel; ++j) values[j] = book[words[j]];
        return load16(values);
#endif
    }
    float of(uint8_t code) const { return book[code].value; }
};

// Calls body with the values of a format; -1 if there is no such format.
template <class Body>
inline int64_t with_values(const Packing& packing, Body body) {
    switch (packing.format) {
        case kInt8: return body(Int8Values{zero_of(packing)});
        case kInt4: return body(Int4Values{zero_of(packing)});
        case kInt6: return body(Int6Values{});
        case kFp8: return body(Fp8Values{});
        case kE2M1: case kIQ4NL: case kNF4: case kFP4: return body(BookValues{book_of(packing.format).values});
        default: return -1;
    }
}

// Calls body(begin, end, group) for the groups of which there are some in [start, start + count).
template <class Body>
inline void for_each_group(const Weight& weight, int64_t start, int64_t count, Body body) {
    const int64_t size = weight.group_inputs(), last = start + count;
    for (int64_t k = start; k < last;) {
        const int64_t group = k / size, end = (group + 1) * size < last ? (group + 1) * size : last;
        body(k, end, group);
        k = end;
    }
}

// What is taken from the codes' values of a group, before and after they are scaled.
struct Shifts {
    Lanes16 point = splat16(0.0f), minimum = splat16(0.0f);

    Shifts(const Weight& weight, const Stream& zeros, int64_t group) {
        if (zeros.type == kBytes) point = zeros.at(group) - splat16(static_cast<float>(zero_of(weight.packing)));
        else if (zeros.type != kNoStream) minimum = zeros.at(group);
    }
    Lanes16 of(Lanes16 value, Lanes16 scale) const { return (value - point) * scale - minimum; }
};

// Panels of codes, which are widened while they are multiplied, with the same roundings everywhere.
struct WidePanels {
    const Weight& weight;

    static constexpr bool kDirect = false, kWide = false;

    int64_t depth() const { return weight.inputs; }

    void widen(Float32* wide, int64_t index, int64_t start, int64_t count) const {
        const Stream scales = weight.scale_stream().from(index, weight.groups());
        const Stream zeros = weight.zero_stream().from(index, weight.groups());
        const uint8_t* panel = weight.panel(index);
        with_values(weight.packing, [&](auto values) {
            for_each_group(weight, start, count, [&](int64_t k, int64_t end, int64_t group) {
                const Lanes16 scale = scales.at(group);
                const Shifts shifts(weight, zeros, group);
                // Whole steps: what is behind the last k is never read.
                const auto put = [&](auto weight_of) {
                    constexpr int64_t kStep = values.kInputs;
                    for (; k < end; k += kStep, wide += kStep * kPanel) {
                        const auto step = values.step(panel + k / kStep * values.kBytes);
#pragma GCC unroll 16
                        for (int64_t i = 0; i < kStep; ++i) store16(wide + i * kPanel, weight_of(values.at(step, i)));
                    }
                };
                if (weight.packing.shifts()) put([&](Lanes16 value) { return shifts.of(value, scale); });
                else put([&](Lanes16 value) { return value * scale; });
            });
            return int64_t{0};
        });
    }
};

}}}  // namespace quire::QUIRE_ISA
