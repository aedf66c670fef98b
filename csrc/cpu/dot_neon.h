// SPDX-License-Identifier: Apache-2.0
// Dot products of Arm processors: with I8MM unsigned bytes by signed ones, with DotProd signed by signed, and without either
// products of 16 bits whose neighbors are added.

#pragma once

#include "dot_steps.h"

namespace quire { namespace QUIRE_ISA { namespace {

struct DotsNeon {
    struct Quads { uint8x16_t at[4]; };

    static Quads load(const uint8_t* step) {
        return {{vld1q_u8(step), vld1q_u8(step + 16), vld1q_u8(step + 32), vld1q_u8(step + 48)}};
    }
    static Quads bytes(const uint8_t* step) { return taken(load(step)); }
    static Quads low(const uint8_t* step) {
        Quads quads = load(step);
        for (uint8x16_t& four : quads.at) four = vandq_u8(four, vdupq_n_u8(15));
        return quads;
    }
    static Quads high(const uint8_t* step) {
        Quads quads = load(step);
        for (uint8x16_t& four : quads.at) four = vshrq_n_u8(four, 4);
        return quads;
    }

    static Quads six(const uint8_t* step, int quad) {
        Quads quads = quad % 2 ? high(step + quad / 2 * kStepBytes) : low(step + quad / 2 * kStepBytes);
        const Quads two = load(step + 2 * kStepBytes);
        const int8x16_t shift = vdupq_n_s8(static_cast<int8_t>(4 - 2 * quad));
        for (int i = 0; i < 4; ++i) {
            quads.at[i] = vorrq_u8(quads.at[i], vandq_u8(vshlq_u8(two.at[i], shift), vdupq_n_u8(48)));
        }
        return quads;
    }

    struct Book {
        uint8x16_t bytes;
        explicit Book(int64_t format) : bytes(vld1q_u8(BookBytes(format).at)) {}
    };
    static Quads looked_up(Quads codes, const Book& book) {
        for (uint8x16_t& four : codes.at) four = vqtbl1q_u8(book.bytes, four);
        return taken(codes);
    }

#if defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)

    struct Sum { int32x4_t at[4]; };

    static Sum start(int32_t word) { return {{vdupq_n_s32(word), vdupq_n_s32(word), vdupq_n_s32(word), vdupq_n_s32(word)}}; }
    static Ints16 total(const Sum& sum) { return {{sum.at[0], sum.at[1], sum.at[2], sum.at[3]}}; }

#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)

    static constexpr int32_t kTaken = 0;

    static Quads taken(Quads quads) { return quads; }
    static void add(Sum& sum, const Quads& weights, const int32_t* x) {
        const int8x16_t values = vreinterpretq_s8_s32(vld1q_dup_s32(x));
        for (int i = 0; i < 4; ++i) sum.at[i] = vusdotq_s32(sum.at[i], weights.at[i], values);
    }

#else

    static constexpr int32_t kTaken = 128;

    static Quads taken(Quads quads) {
        for (uint8x16_t& four : quads.at) four = veorq_u8(four, vdupq_n_u8(128));
        return quads;
    }

#if defined(__ARM_FEATURE_DOTPROD)

    static void add(Sum& sum, const Quads& weights, const int32_t* x) {
        const int8x16_t values = vreinterpretq_s8_s32(vld1q_dup_s32(x));
        for (int i = 0; i < 4; ++i) sum.at[i] = vdotq_s32(sum.at[i], vreinterpretq_s8_u8(weights.at[i]), values);
    }

#else

    // Two sums for each output, of the first and of the second two of four k.
    struct Sum { int32x4_t at[8]; };

    static void add(Sum& sum, const Quads& weights, const int32_t* x) {
        const int8x16_t values = vreinterpretq_s8_s32(vld1q_dup_s32(x));
        for (int i = 0; i < 4; ++i) {
            const int8x16_t four = vreinterpretq_s8_u8(weights.at[i]);
            sum.at[2 * i] = vpadalq_s16(sum.at[2 * i], vmull_s8(vget_low_s8(four), vget_low_s8(values)));
            sum.at[2 * i + 1] = vpadalq_s16(sum.at[2 * i + 1], vmull_high_s8(four, values));
        }
    }
    static Sum start(int32_t word) {
        const int32_t pairs[4] = {word, 0, word, 0};
        Sum sum;
        for (int32x4_t& pair : sum.at) pair = vld1q_s32(pairs);
        return sum;
    }
    static Ints16 total(const Sum& sum) {
        return {{vpaddq_s32(sum.at[0], sum.at[1]), vpaddq_s32(sum.at[2], sum.at[3]), vpaddq_s32(sum.at[4], sum.at[5]),
                 vpaddq_s32(sum.at[6], sum.at[7])}};
    }

#endif
#endif
};

template <int64_t part>
using Int8Dot = Int8DotOf<DotsNeon, part>;
template <int64_t part>
using Int6Dot = Int6DotOf<DotsNeon, part>;
template <int64_t part>
using Int4Dot = Int4DotOf<DotsNeon, part>;
template <int64_t part>
using BookDot = BookDotOf<DotsNeon, part>;

}}}  // namespace quire::QUIRE_ISA
