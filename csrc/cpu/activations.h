// SPDX-License-Identifier: Apache-2.0
// What activations make of vectors of any number of lanes: `activate` of each element, and products of what they end in, with the same bits.

#pragma once

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// By the codes that callers pass; the first two combine two halves, gate and up.
enum Activation : int64_t {
    kNone = 0, kSiluAndMul = 1, kClampedSwiglu = 2, kSquaredRelu = 3, kRelu = 4, kSilu = 5, kGelu = 6, kGeluTanh = 7,
    kSigmoid = 8, kTanh = 9
};

inline bool is_gated(int64_t activation) { return activation == kSiluAndMul || activation == kClampedSwiglu; }

template <class V>
inline V relu(V x) { return x < 0.0f ? V{} : x; }

template <class V>
inline V sigmoid(V x) { return 1.0f / (exp(-x) + 1.0f); }

// x * sigmoid(x).
template <class V>
inline V silu(V x) { return x / (exp(-x) + 1.0f); }

// x * (1 + tanh(u)) / 2 is x * sigmoid(2 u) (Hendrycks and Gimpel, 2016, arXiv:1606.08415).
template <class V>
inline V gelu_tanh(V x) {
    const V u = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (exp(-2.0f * u) + 1.0f);
}

// x * P(N <= x), with the upper tail of the normal distribution from Abramowitz and Stegun, 7.1.26 (error below 8e-8).
template <class V>
inline V gelu(V x) {
    const V z = (x < 0.0f ? -x : x) * 0.7071067812f, t = 1.0f / (0.3275911f * z + 1.0f);
    constexpr float coefficients[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    V series = all_lanes<V>(1.061405429f);
    for (float coefficient : coefficients) series = fma(series, t, all_lanes<V>(coefficient));
    const V tail = 0.5f * series * t * exp(-(z * z));
    return x < 0.0f ? x * tail : x * (1.0f - tail);
}

// The SwiGLU of gpt-oss (arXiv:2508.10925).
template <class V>
inline V clamped_swiglu(V gate, V up) {
    const V most = all_lanes<V>(7.0f);
    const V g = gate > most ? most : gate, u = up > most ? most : up < -most ? -most : up;
    return (u + 1.0f) * (g / (exp(-1.702f * g) + 1.0f));
}

// Calls body(function) with what makes one vector of another; returns its status, or -1 for a code of no such function.
template <class Body>
inline int64_t with_function(int64_t activation, Body body) {
    switch (activation) {
        case kSquaredRelu: return body([](auto x) { return relu(x) * relu(x); });
        case kRelu: return body([](auto x) { return relu(x); });
        case kSilu: return body([](auto x) { return silu(x); });
        case kGelu: return body([](auto x) { return gelu(x); });
        case kGeluTanh: return body([](auto x) { return gelu_tanh(x); });
        case kSigmoid: return body([](auto x) { return sigmoid(x); });
        case kTanh: return body([](auto x) { return tanh(x); });
        default: return -1;
    }
}

// Calls body(ending) with what a product ends in: it makes a vector of two, of which the second counts where halves are
// combined.
template <class Body>
inline void with_ending(int64_t activation, Body body) {
    switch (activation) {
        case kNone: return body([](auto x, auto) { return x; });
        case kSiluAndMul: return body([](auto gate, auto up) { return silu(gate) * up; });
        case kClampedSwiglu: return body([](auto gate, auto up) { return clamped_swiglu(gate, up); });
        default:
            with_function(activation, [&](auto function) {
                body([=](auto x, auto) { return function(x); });
                return int64_t{0};
            });
    }
}

}}}  // namespace quire::QUIRE_ISA
