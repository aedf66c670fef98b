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

// The logits of a word's tokens, at most 32; bit i is of x[i].
inline void mask_word(float* x, uint32_t word, int64_t n) {
    if (word == 0xffffffff) return;
    constexpr Bits kFirst = {1, 2, 4, 8, 16, 32, 64, 128};
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const Vec kept = (kFirst & (word >> i)) != 0 ? load_logits(x + i, lanes) : splat(-kInfinity);
        store(reinterpret_cast<Float32*>(x + i), kept, lanes);
    });
}

}  // namespace

int64_t unusable_rows(void* out, const void* logits, int64_t rows, int64_t n) {
    const float* x = static_cast<const float*>(logits);
    share(rows, kElementWork * rows * n, [=](int64_t row) { static_cast<bool*>(out)[row] = !is_usable(x + row * n, n); });
    return 0;
}

// Shared by words and not by rows, so that a single request with a large vocabulary has all threads, too.
int64_t mask_logits(void* logits, const void* rows, const void* words, int64_t count, int64_t num_rows, int64_t n) {
    const int64_t* row_of = static_cast<const int64_t*>(rows);
    int64_t refused = 0;
    for (int64_t i = 0; i < count; ++i) refused += row_of[i] < 0 || row_of[i] >= num_rows;
    if (refused) return refused;
    float* x = static_cast<float*>(logits);
    const uint32_t* masks = static_cast<const uint32_t*>(words);
    const int64_t width = (n + 31) / 32, whole = n / 32;
    share_ranges(count * width, kElementWork * count * n, [=](int64_t begin, int64_t end) {
        int64_t mask = begin / width, word = begin % width;
        for (int64_t at = begin; at < end; ++at) {
            float* first = x + row_of[mask] * n + 32 * word;
            if (word < whole) mask_word(first, masks[at], 32);
            else mask_word(first, masks[at], n % 32);
            if (++word == width) ++mask, word = 0;
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
