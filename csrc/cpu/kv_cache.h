// SPDX-License-Identifier: Apache-2.0
// How keys and values lie in the paged cache, known to write_kv and paged_attention only.
//
// A block holds, for each key-value head, keys as [head size][block size] and values as [block size][head size]: scores
// are then computed for eight tokens at a time and outputs for eight dimensions, neither with a sum across lanes.
// An int8 cache has a float32 scale for each token and head: after a head's keys as [block size], and after each value.

#pragma once

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Elements that a scale takes in a cache of C.
template <class C> constexpr int64_t kScaleElements = 0;
template <> constexpr int64_t kScaleElements<Int8> = sizeof(float);

template <class Body>
inline int64_t with_cache_dtype(int64_t dtype, Body body) {
    return dtype == kInt8 ? body(Int8{}) : with_dtype(dtype, body);
}

struct CacheShape {
    int64_t num_blocks, heads, block_size, head_size;
};

// Where the keys, or the values, of one block and head begin in a cache of C.
template <class C>
inline int64_t block_start(const CacheShape& shape, int64_t block, int64_t head) {
    return (block * shape.heads + head) * shape.block_size * (shape.head_size + kScaleElements<C>);
}

inline float load_scale(const Int8* p) {
    float scale;
    __builtin_memcpy(&scale, p, sizeof scale);
    return scale;
}

inline void store_scale(Int8* p, float scale) { __builtin_memcpy(p, &scale, sizeof scale); }

}}}  // namespace quire::QUIRE_ISA
