// SPDX-License-Identifier: Apache-2.0
// Logprobs of a row's chosen token and of its likeliest ones, and the chosen one's rank.

#include "logits_row.h"

#include <algorithm>
#include <cmath>

namespace quire { namespace QUIRE_ISA { namespace {

// In an anonymous namespace, so that what the standard library makes of it is not shared between instruction sets.
struct Later {
    bool operator()(uint64_t a, uint64_t b) const { return a > b; }
};

constexpr int64_t kFewBest = 64;

// The keys of the first few tokens, in order; one insertion for each token that was among the best so far.
inline void few_best(const float* x, int64_t n, uint64_t* keys, int64_t count) {
    std::fill(keys, keys + count, uint64_t{0});
    float threshold = -kInfinity;
    for_each_vector(n, [&](int64_t at, auto lanes) {
        const Vec v = load_logits(x + at, lanes);
        if (!any(v > threshold)) return;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            if (!(v[lane] > threshold)) continue;
            const uint64_t key = key_of(v[lane], at + lane);
            int64_t place = count - 1;
            for (; place > 0 && keys[place - 1] < key; --place) keys[place] = keys[place - 1];
            keys[place] = key;
            if (keys[count - 1]) threshold = value_of(keys[count - 1]);
        }
    });
}

inline void many_best(const float* x, int64_t n, uint64_t* keys, int64_t count) {
    for (int64_t id = 0; id < n; ++id) keys[id] = key_of(x[id], id);
    if (count < n) std::nth_element(keys, keys + count, keys + n, Later{});
    std::sort(keys, keys + count, Later{});
}

struct LogSum {
    double log_total;  // ln of the sum of e^(x - best)
    int64_t rank;  // of the chosen token, from 1
};

inline LogSum log_sum(const float* x, int64_t n, float best, int64_t chosen) {
    Sums sums;
    Ints counts = {};
    for_each_vector(n, [&](int64_t at, auto lanes) {
        const Vec v = load_logits(x + at, lanes);
        sums.add(weight_of(v - best));
        counts -= (v > x[chosen]) | ((v == x[chosen]) & ids_below(at, chosen));
    });
    int64_t rank = 1;
    for (int64_t lane = 0; lane < kLanes; ++lane) rank += counts[lane];
    return {std::log(sums.total()), rank};
}

// Ids and logprobs of the chosen token and then of the first `num_top`; false if there is no memory.
inline bool logprobs_row(const float* x, int64_t n, int64_t chosen, int64_t num_top, int64_t* ids, float* logprobs,
                         int64_t* rank) {
    const int64_t count = std::max<int64_t>(num_top, 1);
    Buffer<uint64_t> buffer(count <= kFewBest ? count : n);
    uint64_t* keys = buffer.data();
    if (!keys) return false;
    count <= kFewBest ? few_best(x, n, keys, count) : many_best(x, n, keys, count);
    const float best = value_of(keys[0]);
    const LogSum sum = log_sum(x, n, best, chosen);
    *rank = sum.rank;
    for (int64_t i = 0; i <= num_top; ++i) {
        // Logits that are not finite leave keys unset; what is said of them is void, but within the row.
        ids[i] = i && keys[i - 1] ? id_of(keys[i - 1]) : chosen;
        logprobs[i] = static_cast<float>(static_cast<double>(x[ids[i]]) - static_cast<double>(best) - sum.log_total);
    }
    return true;
}

}  // namespace

// Returns how many chosen tokens are none; if there are any, nothing is computed. Or kNoMemory.
int64_t token_logprobs(void* ids, void* logprobs, void* ranks, const void* logits, const void* chosen, int64_t rows,
                       int64_t n, int64_t num_top) {
    const float* x = static_cast<const float*>(logits);
    const int64_t* tokens = static_cast<const int64_t*>(chosen);
    int64_t refused = 0;
    for (int64_t row = 0; row < rows; ++row) refused += tokens[row] < 0 || tokens[row] >= n;
    if (refused) return refused;
    const int64_t width = num_top + 1;
    Refusals without_memory;
    share(rows, kElementWork * rows * n, [&](int64_t row) {
        const bool fits = logprobs_row(x + row * n, n, tokens[row], num_top, static_cast<int64_t*>(ids) + row * width,
                                       static_cast<float*>(logprobs) + row * width, static_cast<int64_t*>(ranks) + row);
        if (!fits) without_memory.add();
    });
    return without_memory.count() ? kNoMemory : 0;
}

}}  // namespace quire::QUIRE_ISA
