// SPDX-License-Identifier: Apache-2.0
// What the experts of a token have made, put together where several ranks share them.

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kColumns = 256;  // that a thread adds up at a time

// The place that comes behind `last` in the order of numbers, and of places where two are the same; -1 is in front of all, and
// comes behind the last one.
inline int64_t next_place(const int32_t* chosen, int64_t top_k, int64_t last) {
    int64_t best = -1;
    for (int64_t k = 0; k < top_k; ++k) {
        const bool is_behind = last < 0 || chosen[k] > chosen[last] || (chosen[k] == chosen[last] && k > last);
        if (is_behind && (best < 0 || chosen[k] < chosen[best])) best = k;
    }
    return best;
}

}  // namespace

// out [T, H], rows [T, k, H], chosen and weights [T, k]: the rows of a token are added up in the order of its numbers, exactly
// as `experts` does.
int64_t add_choices(void* out, const void* rows, const void* chosen, const void* weights, int64_t tokens, int64_t top_k,
                    int64_t hidden) {
    const int64_t parts = (hidden + kColumns - 1) / kColumns;
    share(tokens * parts, kElementWork * tokens * top_k * hidden, [=](int64_t index) {
        const int64_t token = index / parts, start = index % parts * kColumns;
        const int64_t size = hidden - start < kColumns ? hidden - start : kColumns;
        const auto ids = static_cast<const int32_t*>(chosen) + token * top_k;
        const auto shares = static_cast<const Float32*>(weights) + token * top_k;
        const auto from = static_cast<const Float32*>(rows) + token * top_k * hidden + start;
        const auto to = static_cast<Float32*>(out) + token * hidden + start;
        for_each_vector(size, [&](int64_t i, auto lanes) { store(to + i, Vec{}, lanes); });
        for (int64_t place = next_place(ids, top_k, -1); place >= 0; place = next_place(ids, top_k, place)) {
            const Vec weight = splat(shares[place].value);
            for_each_vector(size, [&](int64_t i, auto lanes) {
                store(to + i, fma(weight, load(from + place * hidden + i, lanes), load(to + i, lanes)), lanes);
            });
        }
    });
    return 0;
}

}}  // namespace quire::QUIRE_ISA
