// SPDX-License-Identifier: Apache-2.0
// What is done about a call before its items: a batch that does not fit is refused, and rows of no request are cleared.

#pragma once

#include <cstddef>

#include "attention.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Whether the queries from `position` on to the last of `length` tokens see at least themselves, what exists at most, and
// no less than the query before.
inline bool is_ascending(const int32_t* last_seen, int64_t position, int64_t length) {
    int64_t before = 0;
    for (int64_t at = position; at < length; before = *last_seen++, ++at)
        if (at >= 0 && (*last_seen < larger_of(at, before) || *last_seen >= length)) return false;
    return true;
}

// 1 + the first request whose description points outside the batch or the cache; 0 if none does.
inline int64_t find_bad_request(const Call& call) {
    const Batch& batch = call.batch;
    const int64_t size = call.shape.block_size;
    if (batch.starts[0] < 0 || batch.starts[batch.requests] > batch.tokens) return batch.requests + 1;
    for (int64_t r = 0; r < batch.requests; ++r) {
        const int64_t count = batch.starts[r + 1] - batch.starts[r], length = batch.lengths[r];
        if (count < 0 || length < 0 || length > batch.table_width * size) return r + 1;
        if (count == 0) continue;
        const Item all{r, 0, 0, count, length - count, length};
        const int32_t* table = all.table(call);
        for (int64_t i = all.first_key(call.features) / size; i * size < length; ++i)
            if (table[i] < 0 || table[i] >= call.shape.num_blocks) return r + 1;
        if (call.features.last_seen && !is_ascending(call.features.last_seen + batch.starts[r], length - count, length))
            return r + 1;
    }
    return 0;
}

inline void clear_rows_of_no_request(const Call& call, int64_t element_bytes) {
    const int64_t row = call.shape.heads * call.group * call.value_size * element_bytes;
    const int64_t begin = call.batch.starts[0], end = call.batch.starts[call.batch.requests];
    if (!call.batch.tokens) return;  // there is no memory to pass on, not even of no bytes
    char* out = static_cast<char*>(call.out);
    __builtin_memset(out, 0, static_cast<size_t>(begin * row));
    __builtin_memset(out + end * row, 0, static_cast<size_t>((call.batch.tokens - end) * row));
}

}}}  // namespace quire::QUIRE_ISA
