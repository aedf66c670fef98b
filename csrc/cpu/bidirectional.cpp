// SPDX-License-Identifier: Apache-2.0
// Attention in both directions among the rows of a step: sequences of different lengths, one behind the other, without a
// cache.
//
// Items, splits, plan and softmax are those of attention over the cache, so a sequence has the same bits in every batch.

#include "attention_batch.h"
#include "attention_schedule.h"
#include "bidirectional.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kAllKeys = int64_t{1} << 40;  // more than there are

// 1 + the first request that is not whole, or longer than there are biases for; 0 if none is.
inline int64_t find_bad_sequence(const Call& call) {
    const Batch& batch = call.batch;
    if (batch.starts[0] < 0 || batch.starts[batch.requests] > batch.tokens) return batch.requests + 1;
    for (int64_t r = 0; r < batch.requests; ++r) {
        const int64_t count = batch.starts[r + 1] - batch.starts[r];
        if (count < 0 || count != batch.lengths[r]) return r + 1;
        if (call.features.biases && count > call.features.center + 1) return r + 1;
    }
    return 0;
}

}  // namespace

// Returns 0, 1 + the number of a request that is none (nothing is computed then), or a negative error.
int64_t bidirectional_attention(void* out, const void* q, const void* k, const void* v, const int32_t* starts,
                                const int32_t* lengths, const float* slopes, const float* biases, int64_t tokens,
                                int64_t requests, int64_t q_heads, int64_t q_token_stride, int64_t q_head_stride,
                                int64_t heads, int64_t k_token_stride, int64_t k_head_stride, int64_t v_token_stride,
                                int64_t v_head_stride, int64_t head_size, int64_t window, int64_t center, float scale,
                                int64_t dtype) {
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        const RowsCall call{{out, q, k, v,
                             {starts, lengths, nullptr, tokens, requests, 0},
                             {0, heads, 0, head_size},
                             head_size, q_heads / heads, q_token_stride, q_head_stride, scale * kLog2E,
                             {window, false, 0.0f, slopes, nullptr, window ? window - 1 : kAllKeys, biases, center},
                             {attend_rows<T>, load_queries<T>, store_row<T>}},
                            k_token_stride, k_head_stride, v_token_stride, v_head_stride};
        if (const int64_t bad = find_bad_sequence(call)) return bad;
        clear_rows_of_no_request(call, sizeof(T));
        return plan_and_run(call);
    });
}

}}  // namespace quire::QUIRE_ISA
