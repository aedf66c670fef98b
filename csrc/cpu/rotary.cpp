// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding, in place on the query and key heads of a step.

#include "rotary.h"

namespace quire { namespace QUIRE_ISA {

// Returns how many tokens have a position outside the cache; those are left as they were.
int64_t rotary_embedding(void* q, void* k, const int64_t* positions, const void* cos_sin, int64_t tokens,
                         int64_t num_positions, int64_t rot_dim, int64_t q_heads, int64_t q_token_stride,
                         int64_t q_head_stride, int64_t k_heads, int64_t k_token_stride, int64_t k_head_stride,
                         int64_t interleaved, int64_t dtype) {
    const Heads queries{q, q_heads, q_token_stride, q_head_stride}, keys{k, k_heads, k_token_stride, k_head_stride};
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        Refusals refused;
        share(tokens, kElementWork * tokens * (q_heads + k_heads) * rot_dim, [&](int64_t token) {
            if (positions[token] < 0 || positions[token] >= num_positions) return refused.add();
            const Float32* cos = static_cast<const Float32*>(cos_sin) + positions[token] * rot_dim;
            rotate_token<T>(queries, token, cos, rot_dim / 2, interleaved != 0);
            rotate_token<T>(keys, token, cos, rot_dim / 2, interleaved != 0);
        });
        return refused.count();
    });
}

}}  // namespace quire::QUIRE_ISA
