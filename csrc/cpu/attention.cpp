// Attention over the paged cache: one kernel for prefill, decode and mixed batches.
//
// The work is cut into items: a request, a key-value head and a few of the request's queries, with all query heads of that
// head as rows. An item walks its keys in tiles of kKeyTile positions and in splits of kSplitTiles tiles, both counted
// from position 0, never from where the batch happens to begin. So neither batch, chunk, block nor thread changes a bit of a
// query's output.

#include "attention_schedule.h"

namespace quire { namespace QUIRE_ISA { namespace {

// 1 + the first request whose description points outside the batch or the cache; 0 if none does.
inline int64_t find_bad_request(const Call& call) {
    const Batch& batch = call.batch;
    const int64_t size = call.shape.block_size;
    if (batch.starts[0] < 0 || batch.starts[batch.requests] > batch.tokens) return batch.requests + 1;
    for (int64_t r = 0; r < batch.requests; ++r) {
        const int64_t count = batch.starts[r + 1] - batch.starts[r], length = batch.lengths[r];
        if (count < 0 || length < 0 || length > batch.table_width * size) return r + 1;
        if (count == 0) continue;
        const Item all{r, 0, 0, count, length - count};
        const int32_t* table = all.table(call);
        for (int64_t i = all.first_key(call.features) / size; i * size < length; ++i)
            if (table[i] < 0 || table[i] >= call.shape.num_blocks) return r + 1;
    }
    return 0;
}

inline void clear_rows_of_no_request(const Call& call, int64_t element_bytes) {
    const int64_t row = call.shape.heads * call.group * call.shape.head_size * element_bytes;
    const int64_t begin = call.batch.starts[0], end = call.batch.starts[call.batch.requests];
    if (!call.batch.tokens) return;  // there is no memory to be told of, not even of no bytes
    char* out = static_cast<char*>(call.out);
    __builtin_memset(out, 0, static_cast<size_t>(begin * row));
    __builtin_memset(out + end * row, 0, static_cast<size_t>((call.batch.tokens - end) * row));
}

}  // namespace

// Returns 0, 1 + the number of a request that is out of bounds (nothing is computed then), or a negative error.
int64_t paged_attention(void* out, const void* q, const void* k_cache, const void* v_cache, const int32_t* starts,
                        const int32_t* lengths, const int32_t* tables, const float* slopes, const float* sinks,
                        int64_t tokens, int64_t requests, int64_t table_width, int64_t q_heads, int64_t token_stride,
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
                            q_heads / heads, token_stride, head_stride, scale * kLog2E,
                            {window, chunked != 0, soft_cap * kLog2E, slopes, sinks},
                            {attend_tile<C>, load_queries<T>, store_row<T>}};
            if (const int64_t bad = find_bad_request(call)) return bad;
            clear_rows_of_no_request(call, sizeof(T));
            return plan_and_run(call);
        });
    });
}

}}  // namespace quire::QUIRE_ISA
