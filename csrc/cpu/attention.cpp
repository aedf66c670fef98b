// SPDX-License-Identifier: Apache-2.0
// Attention over the paged cache: one kernel for prefill, decode and mixed batches.
//
// The work is cut into items: a request, a key-value head and a few of the request's queries, with all query heads of that
// head as rows. An item walks its keys in tiles of kKeyTile positions and in splits of kSplitTiles tiles, both counted
// from position 0, never from where the batch happens to begin. So neither batch, chunk, block nor thread changes a bit of a
// query's output.

#include "attention_batch.h"
#include "attention_schedule.h"

namespace quire { namespace QUIRE_ISA {

// Returns 0, 1 + the number of a request that is out of bounds (nothing is computed then), or a negative error.
int64_t paged_attention(void* out, const void* q, const void* k_cache, const void* v_cache, const int32_t* starts,
                        const int32_t* lengths, const int32_t* tables, const float* slopes, const float* sinks,
                        const int32_t* last_seen, int64_t tokens, int64_t requests, int64_t table_width, int64_t q_heads, int64_t token_stride,
                        int64_t head_stride, int64_t num_blocks, int64_t heads, int64_t block_size, int64_t head_size,
                        int64_t window, int64_t chunked, float scale, float soft_cap, int64_t dtype,
                        int64_t cache_dtype) {
    return with_dtype(dtype, [&](auto t) {
        return with_cache_dtype(cache_dtype, [&](auto c) {
            using T = decltype(t);
            using C = decltype(c);
            const Call call{out, q, k_cache, v_cache,
                            {starts, lengths, tables, tokens, requests, table_width},
                            {num_blocks, heads, block_size, head_size},
                            head_size, q_heads / heads, token_stride, head_stride, scale * kLog2E,
                            {window, chunked != 0, soft_cap * kLog2E, slopes, sinks, 0, nullptr, 0, last_seen},
                            {attend_tile<C>, load_queries<T>, store_row<T>}};
            if (const int64_t bad = find_bad_request(call)) return bad;
            clear_rows_of_no_request(call, sizeof(T));
            return plan_and_run(call);
        });
    });
}

}}  // namespace quire::QUIRE_ISA
