// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norm of one row, which is reduced in an order that its length alone decides.

#pragma once

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// The sum of add(lanes of x, running sum) over a row. Four running sums hide the latency of an addition.
template <class T, class Add>
inline float reduce_row(const T* x, int64_t n, Add add) {
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes)
        for (int64_t j = 0; j < 4; ++j) sums[j] = add(load(x + i + j * kLanes, All{}), sums[j]);
    for (; i + kLanes <= n; i += kLanes) sums[0] = add(load(x + i, All{}), sums[0]);
    if (i < n) {
        const Vec added = add(load(x + i, First{n - i}), sums[0]);
        for (int64_t lane = 0; lane < n - i; ++lane) sums[0][lane] = added[lane];
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
inline float inverse_rms(const T* x, int64_t n, float eps) {
    const float squares = reduce_row(x, n, [](Vec v, Vec total) { return fma(v, v, total); });
    return 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
}

// out may be x.
template <class T, class W>
inline void norm_row(T* out, const T* x, const W* weight, int64_t n, float eps) {
    const Vec scale = splat(inverse_rms(x, n, eps));
    for_each_vector(n, [&](int64_t i, auto lanes) {
        store(out + i, load(x + i, lanes) * scale * load(weight + i, lanes), lanes);
    });
}

}}}  // namespace quire::QUIRE_ISA
