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

}  // namespace

int64_t unusable_rows(void* out, const void* logits, int64_t rows, int64_t n) {
    const float* x = static_cast<const float*>(logits);
    share(rows, kElementWork * rows * n, [=](int64_t row) { static_cast<bool*>(out)[row] = !is_usable(x + row * n, n); });
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
