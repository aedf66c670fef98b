// SPDX-License-Identifier: Apache-2.0
// Products of heads, each with its own part of one packed matrix: blocks of rows that share the threads, as experts do.

#pragma once

#include "linear_int.h"

namespace quire { namespace QUIRE_ISA { namespace {

// out [T, heads, N] and x [T, heads, K]; the weight is that of all heads, [heads * N, K].
struct PerHead {
    Float32* out;
    const Float32* x;
    void* scratch;
    int64_t tokens, heads, token_stride, head_stride;
    Weight weight;

    int64_t outputs() const { return weight.outputs / heads; }
    // Tokens, and heads, that are multiplied together: at most kBlockRows rows in all.
    int64_t block_tokens() const { return tokens < kBlockRows ? tokens : kBlockRows; }
    int64_t block_heads() const {
        const int64_t most = kBlockRows / block_tokens();
        return heads < most ? heads : most;
    }
    int64_t row_floats() const { return weight.padded() + 1; }

    Linear job(int64_t head, int64_t token, int64_t count, int64_t place) const {
        return {out + (token * heads + head) * outputs(), x + token * token_stride + head * head_stride, nullptr,
                static_cast<Float32*>(scratch) + place * row_floats(), count, kNone,
                weight.some(head * outputs(), outputs()), token_stride, weight.outputs};
    }
};

inline int64_t needed_scratch(const PerHead& call) {
    return call.tokens ? 4 * call.block_tokens() * call.block_heads() * call.row_floats() : 0;
}

template <class KernelOf>
inline void run_heads(const PerHead& call, const KernelOf& kernel_of) {
    Block blocks[kBlockRows];
    for (int64_t token = 0; token < call.tokens; token += kBlockRows) {
        const int64_t left = call.tokens - token, count = left < kBlockRows ? left : kBlockRows;
        for (int64_t head = 0; head < call.heads; head += call.block_heads()) {
            const int64_t others = call.heads - head, together = others < call.block_heads() ? others : call.block_heads();
            for (int64_t i = 0; i < together; ++i) blocks[i].job = call.job(head + i, token, count, i * count);
            run_together(blocks, together, kernel_of);
        }
    }
}

}}}  // namespace quire::QUIRE_ISA
