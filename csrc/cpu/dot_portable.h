// SPDX-License-Identifier: Apache-2.0
// Dot products in plain C++: what the others are held to.

#pragma once

#include "dot_steps.h"

namespace quire { namespace QUIRE_ISA { namespace {

struct PlainDots {
    struct Quads { uint8_t bytes[kStepBytes]; };
    struct Sum { int32_t lanes[kPanel]; };
    static constexpr int32_t kTaken = 0;

    static Quads bytes(const uint8_t* step) {
        Quads quads;
        __builtin_memcpy(quads.bytes, step, sizeof quads.bytes);
        return quads;
    }
    static Quads low(const uint8_t* step) {
        Quads quads;
        for (int64_t i = 0; i < kStepBytes; ++i) quads.bytes[i] = step[i] & 15;
        return quads;
    }
    static Quads high(const uint8_t* step) {
        Quads quads;
        for (int64_t i = 0; i < kStepBytes; ++i) quads.bytes[i] = step[i] >> 4;
        return quads;
    }
    static Quads six(const uint8_t* step, int quad) {
        Quads quads;
        for (int64_t i = 0; i < kStepBytes; ++i) {
            const int low = step[quad / 2 * kStepBytes + i] >> quad % 2 * 4 & 15, high = step[2 * kStepBytes + i] >> 2 * quad & 3;
            quads.bytes[i] = static_cast<uint8_t>(low | high << 4);
        }
        return quads;
    }
    using Book = BookBytes;
    static Quads looked_up(Quads codes, const Book& book) {
        for (uint8_t& byte : codes.bytes) byte = book.at[byte];
        return codes;
    }
    static void add(Sum& sum, const Quads& weights, const int32_t* x) {
        int8_t quad[kQuad];
        __builtin_memcpy(quad, x, sizeof quad);
        for (int64_t j = 0; j < kPanel; ++j) {
            for (int64_t i = 0; i < kQuad; ++i) sum.lanes[j] += int32_t{weights.bytes[j * kQuad + i]} * quad[i];
        }
    }
    static Sum start(int32_t word) {
        Sum sum;
        for (int32_t& lane : sum.lanes) lane = word;
        return sum;
    }
    static Ints16 total(const Sum& sum) {
        Ints16 total;
        __builtin_memcpy(&total, sum.lanes, sizeof total);
        return total;
    }
};

template <int64_t part>
using Int8Dot = Int8DotOf<PlainDots, part>;
template <int64_t part>
using Int6Dot = Int6DotOf<PlainDots, part, 5>;
template <int64_t part>
using Int4Dot = Int4DotOf<PlainDots, part, 5>;
template <int64_t part>
using BookDot = BookDotOf<PlainDots, part, 5>;

}}}  // namespace quire::QUIRE_ISA
