// SPDX-License-Identifier: Apache-2.0
// Storing a step's keys and values in their slots, and the same with norms and rotation of queries and keys before it.

#include "kv_cache.h"
#include "norm.h"
#include "rotary.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Calls put(i, element) for each of n elements of x as the cache's type.
template <class C, class T, class Put>
inline void convert_each(const T* x, int64_t n, Put put) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        C converted[kLanes];
        store(converted, load(x + i, lanes), All{});
        for (int64_t j = 0; j < kLanes && i + j < n; ++j) put(i + j, converted[j]);
    });
}

// amax / 127, so that the largest magnitude becomes 127; NaN if any element is not finite.
template <class T>
inline float int8_scale(const T* x, int64_t n) {
    Bits top = {};
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const Bits magnitude = as_bits(load(x + i, lanes)) & 0x7fffffff;
        top = magnitude > top ? magnitude : top;
    });
    uint32_t amax = 0;
    for (int64_t i = 0; i < kLanes; ++i) amax = top[i] > amax ? top[i] : amax;
    return amax < 0x7f800000 ? as_floats(Bits{amax})[0] / 127.0f : __builtin_nanf("");
}

template <class T, class Put>
inline void quantize_each(const T* x, int64_t n, float scale, Put put) {
    const float divisor = scale == 0.0f ? 1.0f : scale;
    for_each_vector(n, [&](int64_t i, auto lanes) {
        // Adding 1.5 * 2^23 rounds to nearest even, and leaves the integer in the low bits; NaN must give some integer.
        Vec ratio = load(x + i, lanes) / divisor;
        ratio = ratio > 127.0f ? splat(127.0f) : ratio;  // a scale that was given may be too small
        ratio = ratio < -128.0f ? splat(-128.0f) : ratio;
        const Bits codes = as_bits((ratio == ratio ? ratio : Vec{}) + 12582912.0f);
        for (int64_t j = 0; j < kLanes && i + j < n; ++j) put(i + j, Int8{static_cast<int8_t>(codes[j] & 0xff)});
    });
}

// What a head's keys or values are divided by: their own scale, or one that was given, unless they are not finite.
inline float scale_of(float own, const float* given) { return given && own == own ? *given : own; }

// `scales` is null, or has what keys are divided by for this head, and what values are `shape.heads` behind it.
template <class T, class C>
inline void write_head(const T* k, const T* v, C* keys, C* values, const CacheShape& shape, int64_t offset,
                       const float* scales) {
    const int64_t n = shape.head_size, size = shape.block_size;
    values += offset * (n + kScaleElements<C>);
    const auto put_key = [&](int64_t i, C element) { keys[i * size + offset] = element; };
    const auto put_value = [&](int64_t i, C element) { values[i] = element; };
    if constexpr (kScaleElements<C> != 0) {
        const float key_scale = scale_of(int8_scale(k, n), scales);
        const float value_scale = scale_of(int8_scale(v, n), scales ? scales + shape.heads : nullptr);
        quantize_each(k, n, key_scale, put_key);
        quantize_each(v, n, value_scale, put_value);
        store_scale(keys + n * size + offset * kScaleElements<C>, key_scale);
        store_scale(values + n, value_scale);
    } else {
        convert_each<C>(k, n, put_key);
        convert_each<C>(v, n, put_value);
    }
}

struct Caches {
    void *keys, *values;
    CacheShape shape;
    const float* scales;
};

template <class T, class C>
inline void write_token(const Heads& k, const Heads& v, const Caches& caches, int64_t token, int64_t slot) {
    const int64_t block = slot / caches.shape.block_size, offset = slot % caches.shape.block_size;
    for (int64_t head = 0; head < k.count; ++head) {
        const int64_t start = block_start<C>(caches.shape, block, head);
        write_head(static_cast<const T*>(k.data) + token * k.token_stride + head * k.head_stride,
                   static_cast<const T*>(v.data) + token * v.token_stride + head * v.head_stride,
                   static_cast<C*>(caches.keys) + start,
                   static_cast<C*>(caches.values) + start, caches.shape, offset,
                   caches.scales ? caches.scales + head : nullptr);
    }
}

// The norm of each head before it is rotated; a null weight is none.
struct HeadNorm {
    const void* weight;
    int64_t dtype, size;
    float eps;
};

template <class T>
inline void norm_token(const Heads& heads, int64_t token, const HeadNorm& norm) {
    if (!norm.weight) return;
    T* x = static_cast<T*>(heads.data) + token * heads.token_stride;
    with_dtype(norm.dtype, [&](auto w) {
        for (int64_t head = 0; head < heads.count; ++head)
            norm_row(x + head * heads.head_stride, x + head * heads.head_stride,
                     static_cast<const decltype(w)*>(norm.weight), norm.size, norm.eps);
        return int64_t{0};
    });
}

// Calls body(T{}, C{}) with the element types of a step's tensors and of the cache.
template <class Body>
inline int64_t with_dtypes(int64_t dtype, int64_t cache_dtype, Body body) {
    return with_dtype(dtype, [&](auto t) { return with_cache_dtype(cache_dtype, [&](auto c) { return body(t, c); }); });
}

}  // namespace

// Returns how many slots are past the end of the cache; those and negative ones are skipped.
int64_t write_kv(void* k, void* v, void* k_cache, void* v_cache, const int64_t* slots, const float* scales,
                 int64_t tokens, int64_t heads, int64_t k_token_stride, int64_t k_head_stride, int64_t v_token_stride, int64_t v_head_stride,
                 int64_t num_blocks, int64_t block_size, int64_t head_size, int64_t dtype, int64_t cache_dtype) {
    const Heads keys{k, heads, k_token_stride, k_head_stride}, values{v, heads, v_token_stride, v_head_stride};
    const Caches caches{k_cache, v_cache, {num_blocks, heads, block_size, head_size}, scales};
    return with_dtypes(dtype, cache_dtype, [&](auto t, auto c) {
        Refusals refused;
        share(tokens, kElementWork * tokens * heads * head_size, [&](int64_t token) {
            if (slots[token] >= num_blocks * block_size) refused.add();
            else if (slots[token] >= 0)
                write_token<decltype(t), decltype(c)>(keys, values, caches, token, slots[token]);
        });
        return refused.count();
    });
}

// Returns how many tokens have a position or a slot out of range; of those nothing is changed.
int64_t rotary_and_write_kv(void* q, void* k, void* v, void* k_cache, void* v_cache, const int64_t* positions,
                            const void* cos_sin, const int64_t* slots, const float* scales, const void* q_norm,
                            const void* k_norm, int64_t tokens, int64_t num_positions, int64_t rot_dim, int64_t q_heads,
                            int64_t q_token_stride, int64_t q_head_stride, int64_t heads, int64_t k_token_stride,
                            int64_t k_head_stride, int64_t v_token_stride, int64_t v_head_stride, int64_t num_blocks,
                            int64_t block_size, int64_t head_size, int64_t interleaved, float eps, int64_t dtype,
                            int64_t cache_dtype, int64_t norm_dtype) {
    const Heads queries{q, q_heads, q_token_stride, q_head_stride};
    const Heads keys{k, heads, k_token_stride, k_head_stride}, values{v, heads, v_token_stride, v_head_stride};
    const Caches caches{k_cache, v_cache, {num_blocks, heads, block_size, head_size}, scales};
    const HeadNorm query_norm{q_norm, norm_dtype, head_size, eps}, key_norm{k_norm, norm_dtype, head_size, eps};
    if (with_dtype(norm_dtype, [](auto) { return int64_t{0}; }) != 0) return -1;
    return with_dtypes(dtype, cache_dtype, [&](auto t, auto c) {
        using T = decltype(t);
        Refusals refused;
        share(tokens, kElementWork * tokens * (q_heads + 2 * heads) * head_size, [&](int64_t token) {
            const int64_t position = positions[token], slot = slots[token];
            if (position < 0 || position >= num_positions || slot >= num_blocks * block_size) return refused.add();
            norm_token<T>(queries, token, query_norm);
            norm_token<T>(keys, token, key_norm);
            const Float32* cos = static_cast<const Float32*>(cos_sin) + position * rot_dim;
            rotate_token<T>(queries, token, cos, rot_dim / 2, interleaved != 0);
            rotate_token<T>(keys, token, cos, rot_dim / 2, interleaved != 0);
            if (slot >= 0) write_token<T, decltype(c)>(keys, values, caches, token, slot);
        });
        return refused.count();
    });
}

}}  // namespace quire::QUIRE_ISA
