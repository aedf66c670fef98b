// SPDX-License-Identifier: Apache-2.0
// Looking at logits before a token is chosen, and changing them.

#include "logits_row.h"

namespace quire { namespace QUIRE_ISA { namespace {

// -inf is a token that cannot be chosen, as long as another one can.
inline bool is_usable(const float* x, int64_t n) {
    constexpr uint32_t kImpossible = 0xff800000;
    Ints bad = {}, possible = {};
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const Bits bits = as_bits(load_logits(x + i, lanes));
        bad |= ((bits & 0x7f800000) == 0x7f800000) & (bits != kImpossible);
        possible |= bits != kImpossible;
    });
    return !any(bad) && any(possible);
}

// What the words [begin, end) of a row's mask say of its n logits.
inline void mask_words(float* x, const uint32_t* words, int64_t begin, int64_t end, int64_t n) {
    constexpr Bits kFirst = {1, 2, 4, 8, 16, 32, 64, 128};
    for (int64_t word = begin; word < end; ++word) {
        const uint32_t bits = words[word];
        if (bits == 0xffffffff) continue;
        float* first = x + 32 * word;
        for_each_vector(n - 32 * word < 32 ? n - 32 * word : 32, [=](int64_t i, auto lanes) {
            const Vec kept = (kFirst & (bits >> i)) != 0 ? load_logits(first + i, lanes) : splat(-kInfinity);
            store(reinterpret_cast<Float32*>(first + i), kept, lanes);
        });
    }
}

}  // namespace

// Returns their number: a recorded graph ends before it samples from them.
int64_t unusable_rows(void* out, const void* logits, int64_t rows, int64_t n) {
    const float* x = static_cast<const float*>(logits);
    Refusals unusable;
    share(rows, kElementWork * rows * n, [&](int64_t row) {
        const bool is_bad = !is_usable(x + row * n, n);
        if (is_bad) unusable.add();
        static_cast<bool*>(out)[row] = is_bad;
    });
    return unusable.count();
}

// Shared by words and not by rows, so that a single request with a large vocabulary has all threads, too.
int64_t mask_logits(void* logits, const void* rows, const void* words, int64_t count, int64_t num_rows, int64_t n) {
    const int64_t* row_of = static_cast<const int64_t*>(rows);
    int64_t refused = 0;
    for (int64_t i = 0; i < count; ++i) refused += row_of[i] < 0 || row_of[i] >= num_rows;
    if (refused) return refused;
    float* x = static_cast<float*>(logits);
    const uint32_t* masks = static_cast<const uint32_t*>(words);
    const int64_t width = (n + 31) / 32;
    share_ranges(count * width, kElementWork * count * n, [=](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end;) {
            const int64_t mask = at / width, word = at % width, rest = end - at;
            const int64_t last = rest < width - word ? word + rest : width;
            mask_words(x + row_of[mask] * n, masks + mask * width, word, last, n);
            at += last - word;
        }
    });
    return 0;
}

int64_t apply_penalties(void* logits, const void* indices, const void* repetition, const void* subtracted,
                        int64_t count, int64_t size) {
    float* x = static_cast<float*>(logits);
    const int64_t* at = static_cast<const int64_t*>(indices);
    int64_t refused = 0;
    for (int64_t i = 0; i < count; ++i) refused += at[i] < 0 || at[i] >= size;
    if (refused) return refused;
    for (int64_t i = 0; i < count; ++i) {
        const double factor = static_cast<const double*>(repetition)[i], value = static_cast<double>(x[at[i]]);
        const double scaled = (value > 0.0 ? value / factor : value * factor) - static_cast<const double*>(subtracted)[i];
        // Brought back into range, so that a tiny or huge factor makes no infinity.
        x[at[i]] = static_cast<float>(scaled > static_cast<double>(kMaxLogit) ? static_cast<double>(kMaxLogit) : scaled);
    }
    return 0;
}

}}  // namespace quire::QUIRE_ISA
