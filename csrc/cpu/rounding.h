// SPDX-License-Identifier: Apache-2.0
// How checkpoints have activations rounded: to integers of 8 bits, or to E4M3, with steps that were given, or that some of a
// row's values find. Their numbers depend on themselves alone.

#pragma once

#include "vec.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr float kE4M3Max = 448.0f, kIntegerMax = 127.0f;

enum Codes : int64_t { kIntegers = 0, kE4M3 = 1 };

struct Rounding {
    int64_t codes;
    float lowest;  // of integers
    float bound;   // of magnitudes, before scales are found; 0: none
    float scale;   // 0: it is found
    float zero;
    bool asymmetric;
};

inline Vec held(Vec v, float low, float high) {
    v = v > high ? splat(high) : v;  // what is no number stays none
    return v < low ? splat(low) : v;
}

// What brings a number to the nearest integer, ties to even, when it is added: no bits behind the point are left.
constexpr float kNoFraction = 12582912.0f;  // 1.5 * 2^23

inline float to_integer(float v) { return v + kNoFraction - kNoFraction; }

struct Range {
    float low, high;
    bool is_finite;
};

// The least and the largest of some numbers and 0.
inline Range range_of(const Float32* x, int64_t size) {
    Vec low = {}, high = {}, poison = {};
    for_each_vector(size, [&](int64_t i, auto lanes) {
        const Vec v = load(x + i, lanes);
        low = v < low ? v : low;
        high = larger(high, v);
        poison = poison + v * 0.0f;
    });
    return {-largest(-low), largest(high), sum(poison) == 0.0f};
}

struct Step {
    float scale, zero;
};

inline Step step_of(const Rounding& how, const Range& range) {
    if (how.asymmetric) {
        const float scale = (range.high - range.low) / (kIntegerMax - how.lowest);
        if (scale == 0.0f) return {1.0f, 0.0f};
        const float zero = how.lowest - range.low / scale;
        return {scale, to_integer(zero > kIntegerMax ? kIntegerMax : zero < how.lowest ? how.lowest : zero)};
    }
    float most = range.high > -range.low ? range.high : -range.low;
    if (how.bound > 0.0f && most > how.bound) most = how.bound;
    const float scale = most / (how.codes == kE4M3 ? kE4M3Max : (kIntegerMax - how.lowest) / 2);
    return {scale == 0.0f ? 1.0f : scale, 0.0f};
}

// That of some values; its scale is NaN if they find it and one of them is not finite.
inline Step step_of(const Rounding& how, const Float32* x, int64_t size) {
    if (how.scale != 0.0f) return {how.scale, how.zero};
    const Range range = range_of(x, size);
    return range.is_finite ? step_of(how, range) : Step{__builtin_nanf(""), 0.0f};
}

// The integers that values become, before they are rounded.
inline Vec in_steps(Vec v, const Rounding& how, const Step& step) {
    return held(v / step.scale + step.zero, how.lowest, kIntegerMax);
}

}}}  // namespace quire::QUIRE_ISA
