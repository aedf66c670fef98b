// SPDX-License-Identifier: Apache-2.0
// Codes of 6 bits in registers of 32 bytes.

#pragma once

#include "dot_steps.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Half of a quad of a step, the first or, half of a quad's bytes later, the second.
inline __m256i six(const uint8_t* step, int quad) {
    const auto load_at = [=](int64_t at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step + at)); };
    const __m256i four = load_at(quad / 2 * kStepBytes), two = load_at(2 * kStepBytes);
    const __m256i low = quad % 2 ? _mm256_srli_epi16(four, 4) : four;
    const __m256i high = quad < 2 ? _mm256_slli_epi16(two, 4 - 2 * quad) : _mm256_srli_epi16(two, 2 * quad - 4);
    return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), _mm256_and_si256(high, _mm256_set1_epi8(48)));
}

}}}  // namespace quire::QUIRE_ISA
