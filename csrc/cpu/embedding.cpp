// SPDX-License-Identifier: Apache-2.0
// Rows of a table, copied as bytes: the element type does not matter.

#include "kernels.h"

#include <cstddef>

namespace quire { namespace QUIRE_ISA {

// Returns how many ids are outside the table; their rows are left as they were.
int64_t embedding(void* out, const int64_t* ids, const void* table, int64_t tokens, int64_t num_rows,
                  int64_t row_bytes) {
    Refusals refused;
    share(tokens, kElementWork * tokens * row_bytes / 4, [&](int64_t token) {
        const int64_t id = ids[token];
        if (id < 0 || id >= num_rows) return refused.add();
        if (!row_bytes) return;  // there may be no memory at all
        __builtin_memcpy(static_cast<char*>(out) + token * row_bytes, static_cast<const char*>(table) + id * row_bytes,
                         static_cast<size_t>(row_bytes));
    });
    return refused.count();
}

}}  // namespace quire::QUIRE_ISA
