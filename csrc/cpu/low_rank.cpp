// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters of one matrix.

#include "kernels.h"
#include "low_rank.h"

namespace quire { namespace QUIRE_ISA {

// out [rows, outputs] += what the adapters make of x [rows, inputs]. Returns how many rows have an adapter that does not exist;
// then nothing was done; -2 for too little scratch memory.
int64_t low_rank_linear(void* out, const void* x, const int32_t* adapter_rows, const void* adapters, void* scratch,
                    int64_t scratch_bytes, int64_t rows) {
    const Stacks& of = *static_cast<const Stacks*>(adapters);
    if (scratch_bytes < 4 * of.scratch(rows)) return -2;
    int64_t refused = 0;
    for (int64_t row = 0; row < rows; ++row) refused += adapter_rows[row] >= of.slots;
    if (!refused) {
        add_adapters(of, {static_cast<Float32*>(out), static_cast<const Float32*>(x), adapter_rows, rows},
                     static_cast<Float32*>(scratch));
    }
    return refused;
}

}}  // namespace quire::QUIRE_ISA
