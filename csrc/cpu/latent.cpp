// SPDX-License-Identifier: Apache-2.0
// Latent attention over the paged cache, and the writing of latents to it (MLA; DeepSeek-V2, 2024, arXiv:2405.04434).
//
// A cache is [blocks][block size][rank + rope size]: what attention knows as values of one head, which are keys as well.

#include "attention_batch.h"
#include "attention_schedule.h"
#include "latent_tile.h"
#include "norm.h"
#include "rotary.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kMostRope = 512;  // elements of a key that are rotated

// A token's row as it is made, and what is done to its parts.
struct LatentRow {
    int64_t rank, rope;
    const Float32* cos;
    bool interleaved;
    float eps;
};

// The latent, normed, and the key, rotated, as the cache keeps them.
template <class T, class C, class W>
inline void write_latent(C* out, const T* x, const W* norm, const LatentRow& row) {
    const Vec scale = splat(inverse_rms(x, row.rank, row.eps));
    for_each_vector(row.rank, [&](int64_t i, auto lanes) {
        store(out + i, load(x + i, lanes) * scale * load(norm + i, lanes), lanes);
    });
    Float32 key[kMostRope];
    for_each_vector(row.rope, [&](int64_t i, auto lanes) { store(key + i, load(x + row.rank + i, lanes), lanes); });
    rotate_token<Float32>({key, 1, 0, 0}, 0, row.cos, row.rope / 2, row.interleaved);
    for_each_vector(row.rope, [&](int64_t i, auto lanes) { store(out + row.rank + i, load(key + i, lanes), lanes); });
}

}  // namespace

// Returns how many tokens have a position or a slot out of range; of those nothing is changed.
int64_t write_latents(void* q, const void* rows, const void* norm, const int64_t* positions, const void* cos_sin, void* cache,
                      const int64_t* slots, int64_t tokens, int64_t num_positions, int64_t rank, int64_t rope, int64_t heads,
                      int64_t q_token_stride, int64_t q_head_stride, int64_t row_stride, int64_t num_slots,
                      int64_t interleaved, float eps, int64_t dtype, int64_t cache_dtype, int64_t norm_dtype) {
    const Heads queries{q, heads, q_token_stride, q_head_stride};
    if (rope > kMostRope) return -1;
    return with_dtype(dtype, [&](auto t) { return with_dtype(cache_dtype, [&](auto c) { return with_dtype(norm_dtype, [&](auto w) {
        using T = decltype(t);
        Refusals refused;
        share(tokens, kElementWork * tokens * (heads * rope + rank), [&](int64_t token) {
            const int64_t position = positions[token], slot = slots[token];
            if (position < 0 || position >= num_positions || slot >= num_slots) return refused.add();
            const LatentRow row{rank, rope, static_cast<const Float32*>(cos_sin) + position * rope, interleaved != 0, eps};
            rotate_token<T>(queries, token, row.cos, rope / 2, row.interleaved);
            if (slot < 0) return;
            write_latent(static_cast<decltype(c)*>(cache) + slot * (rank + rope), static_cast<const T*>(rows) + token * row_stride,
                         static_cast<const decltype(w)*>(norm), row);
        });
        return refused.count();
    }); }); });
}

// As paged_attention, of which the latents of one head are keys and values.
int64_t latent_attention(void* out, const void* q, const void* q_rope, const void* cache, const int32_t* starts,
                         const int32_t* lengths, const int32_t* tables, int64_t tokens, int64_t requests,
                         int64_t table_width, int64_t heads, int64_t token_stride, int64_t head_stride,
                         int64_t rope_token_stride, int64_t rope_head_stride, int64_t num_blocks, int64_t block_size,
                         int64_t rank, int64_t rope, float scale, int64_t dtype, int64_t cache_dtype) {
    return with_dtype(dtype, [&](auto t) {
        return with_dtype(cache_dtype, [&](auto c) {
            using T = decltype(t);
            const LatentCall call{{out, q, cache, cache,
                                   {starts, lengths, tables, tokens, requests, table_width},
                                   {num_blocks, 1, block_size, rank + rope},
                                   rank, heads, token_stride, head_stride, scale * kLog2E,
                                   {},
                                   {attend_latents<decltype(c)>, load_latent_queries<T>, store_row<T>}},
                                  q_rope, rope_token_stride, rope_head_stride};
            if (const int64_t bad = find_bad_request(call)) return bad;
            clear_rows_of_no_request(call, sizeof(T));
            return plan_and_run(call);
        });
    });
}

}}  // namespace quire::QUIRE_ISA
