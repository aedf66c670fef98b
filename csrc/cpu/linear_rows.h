// SPDX-License-Identifier: Apache-2.0
// Activations as the float kernels take them: rows of a tile side by side, value of k after value of k.

#pragma once

#include "linear.h"

namespace quire { namespace QUIRE_ISA { namespace {

template <class Rows>
inline void take_floats(Float32* out, const Float32* x, int64_t count) {
    for_each_vector(count, [&](int64_t k, auto lanes) { store(out + k, Rows::some(x + k, lanes), lanes); });
}

// In float32, as they are. `X` holds kTogether<X> values of k; `kMost` rows have their sums with `kPanels`
// panels in registers.
struct Exact {
    using X = Float32;
    static constexpr int kMost = kFloatRows, kPanels = kWidePanels;
    static constexpr bool kAsTheyAre = true;

    template <class Some>
    static Vec some(const Float32* x, Some lanes) { return load(x, lanes); }

    static void take(X* out, const Float32* x, int64_t count) { take_floats<Exact>(out, x, count); }
};

// Rounded to bfloat16, and widened again.
struct Rounded {
    using X = Float32;
    static constexpr int kMost = kFloatRows, kPanels = kWidePanels;
    static constexpr bool kAsTheyAre = false;

    template <class Some>
    static Vec some(const Float32* x, Some lanes) { return widen(narrow(load(x, lanes), BFloat16{}), BFloat16{}); }

    static void take(X* out, const Float32* x, int64_t count) { take_floats<Rounded>(out, x, count); }
};

#ifdef __AVX512BF16__

// Two bfloat16, the first in the high half.
struct Pair { uint32_t bits; };
template <>
constexpr int64_t kTogether<Pair> = 2;

// Rounded to bfloat16, in pairs.
struct Paired {
    using X = Pair;
    static constexpr int kMost = 16, kPanels = 1;
    static constexpr bool kAsTheyAre = false;

    static void take(X* out, const Float32* x, int64_t count) {
        for (; count >= 32; count -= 32, out += 16, x += 32) {
            const __m512bh halves = _mm512_cvtne2ps_pbh(load16(x + 16).all, load16(x).all);
            _mm512_storeu_si512(out, _mm512_rol_epi32(reinterpret_cast<__m512i>(halves), 16));
        }
        for_each_vector(count, [&](int64_t k, auto lanes) {
            uint32_t pairs[kLanes / 2];
            const Halves halves = narrow(load(x + k, lanes), BFloat16{});
            __builtin_memcpy(pairs, &halves, sizeof pairs);
            const int64_t left = (count - k + 1) / 2;
            for (int64_t i = 0; i < kLanes / 2 && i < left; ++i) out[k / 2 + i].bits = pairs[i] << 16 | pairs[i] >> 16;
        });
    }
};

// One product after the other, each added without a rounding of its own, as `fma` does.
inline Lanes16 dot(Pair x, Ints16 weights, Lanes16 sum) {
    const __m512i pair = _mm512_set1_epi32(static_cast<int32_t>(x.bits));
    return {_mm512_dpbf16_ps(sum.all, reinterpret_cast<__m512bh>(weights.all), reinterpret_cast<__m512bh>(pair))};
}

#else

using Paired = Rounded;

#endif

}}}  // namespace quire::QUIRE_ISA
