// SPDX-License-Identifier: Apache-2.0
// Random numbers that depend on a seed and a position, and on nothing that was drawn before.

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Philox4x32-10 of J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): the highest 52 bits of
// the first two words of counter (position, 0) and key seed, as a number in [0, 1).
inline double philox_uniform_of(uint64_t seed, uint64_t position) {
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t{0xd2511f53} * counter[0], second = uint64_t{0xcd9e8d57} * counter[2];
        counter[0] = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0];
        counter[1] = static_cast<uint32_t>(second);
        counter[2] = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1];
        counter[3] = static_cast<uint32_t>(first);
        key[0] += 0x9e3779b9;
        key[1] += 0xbb67ae85;
    }
    const uint64_t bits = static_cast<uint64_t>(counter[0]) << 20 | counter[1] >> 12;
    return static_cast<double>(bits) * 0x1p-52;
}

}  // namespace

int64_t philox_uniform(void* out, const void* seeds, const void* positions, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        static_cast<double*>(out)[i] =
            philox_uniform_of(static_cast<const uint64_t*>(seeds)[i], static_cast<const uint64_t*>(positions)[i]);
    }
    return 0;
}

}}  // namespace quire::QUIRE_ISA
