// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of one token's heads, in place.

#pragma once

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Heads of one token after another: a token's first element, then strides.
struct Heads {
    void* data;
    int64_t count, token_stride, head_stride;
};

// Pairs (i, i + half). cos and sin have `half` elements.
template <class T>
inline void rotate_halves(T* x, const Float32* cos, const Float32* sin, int64_t half) {
    for_each_vector(half, [&](int64_t i, auto lanes) {
        const Vec a = load(x + i, lanes), b = load(x + half + i, lanes);
        const Vec c = load(cos + i, lanes), s = load(sin + i, lanes);
        store(x + i, a * c - b * s, lanes);
        store(x + half + i, b * c + a * s, lanes);
    });
}

// Pairs (2 i, 2 i + 1): one vector holds four of them, each rotated with its neighbor lane.
template <class T>
inline void rotate_pairs(T* x, const Float32* cos, const Float32* sin, int64_t half) {
    for_each_vector(2 * half, [&](int64_t i, auto lanes) {
        Vec c = {}, s = {};
        for (int64_t j = 0; j < kLanes && i + j < 2 * half; ++j) {
            c[j] = cos[(i + j) / 2].value;
            s[j] = j % 2 ? sin[(i + j) / 2].value : -sin[(i + j) / 2].value;
        }
        const Vec v = load(x + i, lanes);
        const Vec neighbor = {v[1], v[0], v[3], v[2], v[5], v[4], v[7], v[6]};
        store(x + i, v * c + neighbor * s, lanes);
    });
}

template <class T>
inline void rotate_token(const Heads& heads, int64_t token, const Float32* cos, int64_t half, bool interleaved) {
    T* x = static_cast<T*>(heads.data) + token * heads.token_stride;
    for (int64_t head = 0; head < heads.count; ++head, x += heads.head_stride) {
        if (interleaved) rotate_pairs(x, cos, cos + half, half);
        else rotate_halves(x, cos, cos + half, half);
    }
}

}}}  // namespace quire::QUIRE_ISA
