// SPDX-License-Identifier: Apache-2.0
// Activations rounded as checkpoints say and widened again.

#include "kernels.h"
#include "rounding.h"

namespace quire { namespace QUIRE_ISA { namespace {

inline Vec to_integers(Vec v) { return v + kNoFraction - kNoFraction; }

// To nearest, ties to even: three bits of a normal number's mantissa stay, and smaller ones are multiples of 2^-9.
inline Vec to_e4m3(Vec v) {
    const Bits bits = as_bits(v), magnitude = bits & 0x7fffffff, sign = bits & 0x80000000;
    const Bits normal = (magnitude + 0x7ffff + ((magnitude >> 20) & 1)) & 0xfff00000;
    const Bits small = as_bits(as_floats(magnitude) + 24576.0f - 24576.0f);
    return as_floats((magnitude < 0x3c800000 ? small : normal) | sign);
}

inline void round_group(Float32* out, const Float32* x, int64_t size, const Rounding& how) {
    const Step step = step_of(how, x, size);
    for_each_vector(size, [&](int64_t i, auto lanes) {
        const Vec v = load(x + i, lanes);
        const Vec rounded = how.codes == kE4M3 ? to_e4m3(held(v / step.scale, -kE4M3Max, kE4M3Max))
                                               : to_integers(in_steps(v, how, step)) - step.zero;
        store(out + i, rounded * step.scale, lanes);
    });
}

}  // namespace

// Returns -1 for unknown codes.
int64_t round_rows(void* out, const void* x, int64_t rows, int64_t inputs, int64_t group, int64_t codes, float lowest,
                   float bound, float scale, float zero, int64_t asymmetric) {
    if (codes != kIntegers && codes != kE4M3) return -1;
    const Rounding how{codes, lowest, bound, scale, zero, asymmetric != 0};
    const int64_t groups = inputs ? (inputs + group - 1) / group : 0;
    share(rows * groups, 2 * kElementWork * rows * inputs, [=](int64_t item) {
        const int64_t start = item % groups * group, offset = item / groups * inputs + start;
        round_group(static_cast<Float32*>(out) + offset, static_cast<const Float32*>(x) + offset,
                    smaller_of(inputs - start, group), how);
    });
    return 0;
}

}}  // namespace quire::QUIRE_ISA
