// Rotary position embedding, in place on the query and key heads of a step.

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

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

// Pairs (2 i, 2 i + 1): one vector holds four of them, each rotated with its neighbour lane.
template <class T>
inline void rotate_pairs(T* x, const Float32* cos, const Float32* sin, int64_t half) {
    for_each_vector(2 * half, [&](int64_t i, auto lanes) {
        Vec c = {}, s = {};
        for (int64_t j = 0; j < kLanes && i + j < 2 * half; ++j) {
            c[j] = cos[(i + j) / 2].value;
            s[j] = j % 2 ? sin[(i + j) / 2].value : -sin[(i + j) / 2].value;
        }
        const Vec v = load(x + i, lanes);
        const Vec neighbour = {v[1], v[0], v[3], v[2], v[5], v[4], v[7], v[6]};
        store(x + i, v * c + neighbour * s, lanes);
    });
}

template <class T>
inline void rotate_heads(T* x, const Float32* cos, int64_t heads, int64_t head_stride, int64_t half, bool interleaved) {
    for (int64_t head = 0; head < heads; ++head) {
        if (interleaved) rotate_pairs(x + head * head_stride, cos, cos + half, half);
        else rotate_halves(x + head * head_stride, cos, cos + half, half);
    }
}

}  // namespace

// Returns how many tokens have a position outside the cache; those are left as they were.
int64_t rotary_embedding(void* q, void* k, const int64_t* positions, const void* cos_sin, int64_t tokens,
                         int64_t num_positions, int64_t rot_dim, int64_t q_heads, int64_t q_token_stride,
                         int64_t q_head_stride, int64_t k_heads, int64_t k_token_stride, int64_t k_head_stride,
                         int64_t interleaved, int64_t dtype) {
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        int64_t refused = 0;
#pragma omp parallel for schedule(static) reduction(+ : refused) \
    if (tokens * (q_heads + k_heads) * rot_dim >= kParallelElements)
        for (int64_t token = 0; token < tokens; ++token) {
            if (positions[token] < 0 || positions[token] >= num_positions) {
                ++refused;
                continue;
            }
            const Float32* cos = static_cast<const Float32*>(cos_sin) + positions[token] * rot_dim;
            rotate_heads(static_cast<T*>(q) + token * q_token_stride, cos, q_heads, q_head_stride, rot_dim / 2,
                         interleaved != 0);
            rotate_heads(static_cast<T*>(k) + token * k_token_stride, cos, k_heads, k_head_stride, rot_dim / 2,
                         interleaved != 0);
        }
        return refused;
    });
}

}}  // namespace quire::QUIRE_ISA
