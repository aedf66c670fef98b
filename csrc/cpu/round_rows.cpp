// Activations rounded as checkpoints say and widened again: to integers of 8 bits, or to E4M3, with scales that were given, or
// that each group of a row's inputs finds. A group's numbers depend on itself alone.

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr float kE4M3Max = 448.0f, kIntegerMax = 127.0f;

enum Codes : int64_t { kIntegers = 0, kE4M3 = 1 };

struct Rounding {
    int64_t codes;
    float lowest;  // of integers
    float bound;   // of magnitudes, before scales are found; 0: none
    float scale;   // 0: each group finds its own
    float zero;
    bool asymmetric;
};

inline Vec held(Vec v, float low, float high) {
    v = v > high ? splat(high) : v;  // what is no number stays none
    return v < low ? splat(low) : v;
}

// To nearest, ties to even: adding 1.5 * 2^23 leaves no bits behind the point.
inline Vec to_integers(Vec v) { return v + 12582912.0f - 12582912.0f; }
inline float to_integer(float v) { return v + 12582912.0f - 12582912.0f; }

// To nearest, ties to even: three bits of a normal number's mantissa stay, and smaller ones are multiples of 2^-9.
inline Vec to_e4m3(Vec v) {
    const Bits bits = as_bits(v), magnitude = bits & 0x7fffffff, sign = bits & 0x80000000;
    const Bits normal = (magnitude + 0x7ffff + ((magnitude >> 20) & 1)) & 0xfff00000;
    const Bits small = as_bits(as_floats(magnitude) + 24576.0f - 24576.0f);
    return as_floats((magnitude < 0x3c800000 ? small : normal) | sign);
}

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

// To floats, or to codes less their zero point, whose scale is left in `scale`.
inline void round_group(Float32* out, Float32* scale, const Float32* x, int64_t size, const Rounding& how) {
    Step step{how.scale, how.zero};
    if (how.scale == 0.0f) {
        const Range range = range_of(x, size);
        step = range.is_finite ? step_of(how, range) : Step{__builtin_nanf(""), 0.0f};
    }
    const float widened = scale ? 1.0f : step.scale;
    if (scale) scale->value = step.scale;
    for_each_vector(size, [&](int64_t i, auto lanes) {
        const Vec steps = load(x + i, lanes) / step.scale;
        const Vec rounded = how.codes == kE4M3 ? to_e4m3(held(steps, -kE4M3Max, kE4M3Max))
                                               : to_integers(held(steps + step.zero, how.lowest, kIntegerMax)) - step.zero;
        store(out + i, rounded * widened, lanes);
    });
}

}  // namespace

// Leaves codes in `out` where there is room for scales, [rows][groups]. Returns -1 for unknown codes.
int64_t round_rows(void* out, void* scales, const void* x, int64_t rows, int64_t inputs, int64_t group, int64_t codes, float lowest,
                   float bound, float scale, float zero, int64_t asymmetric) {
    if (codes != kIntegers && codes != kE4M3) return -1;
    const Rounding how{codes, lowest, bound, scale, zero, asymmetric != 0};
    const int64_t groups = inputs ? (inputs + group - 1) / group : 0;
    share(rows * groups, 2 * kElementWork * rows * inputs, [=](int64_t item) {
        const int64_t start = item % groups * group, offset = item / groups * inputs + start;
        round_group(static_cast<Float32*>(out) + offset, scales ? static_cast<Float32*>(scales) + item : nullptr,
                    static_cast<const Float32*>(x) + offset, smaller_of(inputs - start, group), how);
    });
    return 0;
}

}}  // namespace quire::QUIRE_ISA
