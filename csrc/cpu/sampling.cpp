// SPDX-License-Identifier: Apache-2.0
// The choice of one token per row of logits, without a copy of the vocabulary and without sorting it.

#include "sampling_draw.h"

namespace quire { namespace QUIRE_ISA { namespace {

// What a row asks for: a row of the settings that callers pass.
struct Settings {
    double temperature, log_min_p, top_k, top_p;

    // Others would lead out of the histogram, or have no integer to be.
    bool valid() const { return temperature >= 0.0 && temperature < kMaxLogit && top_k >= 1.0 && top_k < 0x1p62; }
};

// The token, -1 if there is none to choose, or kNoMemory.
inline int64_t sample_row(const float* logits, int64_t n, const Settings& settings, double uniform) {
    const float best = max_of(logits, n);
    if (best == -kInfinity) return -1;
    if (settings.temperature == 0.0) return first_equal(logits, n, best);
    const Shaped row(logits, n, best, static_cast<float>(settings.temperature), static_cast<float>(settings.log_min_p));
    if (row.best == -kInfinity) return -1;
    const Prefix kept = kept_prefix(row, static_cast<int64_t>(settings.top_k), settings.top_p);
    return kept.is_known ? Draw(row, kept.last).choose(uniform) : kNoMemory;
}

}  // namespace

// Returns how many rows have settings that mean nothing; if there are any, nothing is chosen. Or kNoMemory.
int64_t sample_tokens(void* out, const void* logits, const void* settings, const void* uniforms, int64_t rows,
                      int64_t n) {
    const float* x = static_cast<const float*>(logits);
    const Settings* asked = static_cast<const Settings*>(settings);
    int64_t refused = 0;
    for (int64_t row = 0; row < rows; ++row) refused += !asked[row].valid();
    if (refused) return refused;
    Refusals without_memory;
    share(rows, kElementWork * rows * n, [&](int64_t row) {
        const double uniform = static_cast<const double*>(uniforms)[row];
        const int64_t token = sample_row(x + row * n, n, asked[row], uniform);
        if (token == kNoMemory) without_memory.add();
        static_cast<int64_t*>(out)[row] = token;
    });
    return without_memory.count() ? kNoMemory : 0;
}

}}  // namespace quire::QUIRE_ISA
